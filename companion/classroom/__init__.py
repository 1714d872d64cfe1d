"""What only a notebook needs: live panel, explorers, pictures, lab book, checks."""
