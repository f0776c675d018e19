"""The router's decisions in virtual time: the shipped core before engine models, no sockets."""
