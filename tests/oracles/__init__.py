"""What others wrote judges us: SGLang's own codec, its own test kits, and its router."""
