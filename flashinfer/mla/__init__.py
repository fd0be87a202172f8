"""Multi-head latent attention (MLA) over a paged cache of latents, with absorbed projections."""

from flashinfer.mla.batch import BatchMLAPagedAttentionWrapper

__all__ = ["BatchMLAPagedAttentionWrapper"]
