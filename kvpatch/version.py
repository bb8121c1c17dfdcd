"""The version of this package; read by the build too."""

VERSION = "0.1.0"
