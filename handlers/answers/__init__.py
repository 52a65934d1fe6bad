"""Parts of answers that contracts share."""
