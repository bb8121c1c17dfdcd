"""A Triton backend "cpu" for Model Runner V2, interpreted; imported without kvpatch."""
