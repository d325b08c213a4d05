"""Decides where parameters live: ZeRO with its stage chosen, FSDP2, and the choice between them."""
