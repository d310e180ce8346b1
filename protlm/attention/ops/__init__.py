"""Operations that several mechanisms use; no module here imports a mechanism."""
