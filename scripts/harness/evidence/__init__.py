"""What a recorded run stands for: the code it executed, and which runs a change asks for."""
