"""Parts of one optimizer step that the loop uses: weights, averages, late flags, checks of settings."""
