"""The portable variant of `Step` and `Commit`: a chain of tokens (step.py), a tree of draft tokens (tree.py), and the
commit of a verification (commit.py). That of `Chunks`, the prefill, is chunks.py."""

from flashinfer._core.implementation import Implementation
from flashinfer.ops.recurrent.delta import Commit, Step
from flashinfer.ops.recurrent.delta.commit import commit, launch_commit
from flashinfer.ops.recurrent.delta.config import with_many
from flashinfer.ops.recurrent.delta.step import launch_step, step
from flashinfer.ops.recurrent.delta.tree import launch_tree, tree

# Bytes of stack a thread may use, for trees of 64 tokens; nothing else uses any.
STACK_BUDGET = 384


def kernels(problem, config):
    if isinstance(problem, Commit):
        yield launch_commit, problem, config
    else:
        yield launch_tree if problem.tokens else launch_step, problem, config
        many = with_many(problem, config)
        if many is not None:
            yield launch_step, problem, many


def _verify(problem, config, tokens, gates, pool, out, scale, kept, norm, parents):
    """Run a `Step`; operands.py describes the records."""
    if problem.tokens:
        tree(problem, config, tokens, gates, pool, out, scale, kept, parents)
    else:
        step(problem, config, tokens, gates, pool, out, scale, kept, norm)


LAUNCHERS = (launch_step, launch_tree, launch_commit)
IMPLEMENTATION = Implementation(
    {Step: _verify, Commit: commit}, LAUNCHERS, kernels=kernels, stack_budget=STACK_BUDGET
)
