"""The spine: targets, dispatch, launch, caches. It imports nothing of the package above it."""
