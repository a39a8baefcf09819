"""What only the Pie runtime needs: the launch line, the handshake, the serving loop, the trace."""
