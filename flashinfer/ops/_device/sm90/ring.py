"""A pair of mbarriers for each stage of a ring, between the warps that fill stages and the warps that read them.

Both sides count their steps from 0. Step n uses stage n % STAGES, and an mbarrier completes once in STAGES steps, so
its phase is (n // STAGES) & 1. With three stages:

    step     0  1  2  3  4  5  6
    stage    0  1  2  0  1  2  0
    phase    0  0  0  1  1  1  0

A writer waits for the phase before its own. For the first STAGES steps an mbarrier counts that phase as complete, so
all stages are free at first.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon, mbarrier


@aggregate
class Channel:
    """`full` and `empty`: an mbarrier [STAGES, 1] each, see `make_channel`.

    A writer calls acquire, writes, and calls commit; or it calls expect, and its copies signal the barrier.
    A reader calls wait, reads, and calls release.
    """

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def stage(self, step):
        return step % self.full.shape[0]

    @gluon.jit
    def phase(self, step):
        return (step // self.full.shape[0]) & 1

    @gluon.jit
    def acquire(self, step):
        """Writer: the step's stage, once its readers have released it."""
        stage = self.stage(step)
        mbarrier.wait(self.empty.index(stage), self.phase(step) ^ 1)
        return stage

    @gluon.jit
    def expect(self, step, size):
        """Writer: acquire for TMA copies of `size` bytes in all: (stage, the mbarrier that they signal)."""
        full = self.full.index(self.stage(step))
        stage = self.acquire(step)
        mbarrier.expect(full, size)
        return stage, full

    @gluon.jit
    def commit(self, step, pred=True):
        """Writer: one of the arrivals that make the stage full."""
        mbarrier.arrive(self.full.index(self.stage(step)), count=1, pred=pred)

    @gluon.jit
    def wait(self, step, pred=True):
        """Reader: the step's stage, once it is full."""
        stage = self.stage(step)
        mbarrier.wait(self.full.index(stage), self.phase(step), pred=pred)
        return stage

    @gluon.jit
    def release(self, step, pred=True):
        """Reader: one of the arrivals that free the stage."""
        mbarrier.arrive(self.empty.index(self.stage(step)), count=1, pred=pred)


@gluon.jit
def make_barriers(COUNT: gl.constexpr):
    """COUNT mbarriers, each of which completes a phase with every arrival."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def make_channel(STAGES: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """A channel whose stages are full after WRITERS arrivals, and free after READERS. All warps of the block call it,
    before warp specialization."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    return Channel(full, empty)
