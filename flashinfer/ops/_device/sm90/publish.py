"""Records of a few int32 words that one warp writes to shared memory and warps of other roles read.

A record describes a work item. Warps read its words where they use them, so the words take no registers during a loop
over K or over keys.
"""

from flashinfer._core.gluon_compat import aggregate, gl, gluon
from flashinfer.ops._device.sm90.ring import Channel, make_channel


@gluon.jit
def write_words(place, values):
    """Stores a tuple of int32 `values` in shared memory [len(values)], a power of two."""
    COUNT: gl.constexpr = place.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0])
    index = gl.arange(0, COUNT, LAYOUT)
    words = gl.full([COUNT], values[0], gl.int32, LAYOUT)
    for i in gl.static_range(1, COUNT):
        words = gl.where(index == i, values[i], words)
    place.store(words)


@gluon.jit
def read_word(place, I: gl.constexpr = 0):
    """Word I of shared memory [COUNT], as a scalar."""
    COUNT: gl.constexpr = place.shape[0]
    words = place.load(gl.BlockedLayout([COUNT], [32], [gl.num_warps()], [0]))
    return gl.sum(gl.where(gl.arange(0, COUNT, words.type.layout) == I, words, 0), 0)


@aggregate
class Slots:
    """Record n is in slot n % SLOTS of `words`, int32 [SLOTS, WORDS]. The caller orders writes and reads."""

    words: gl.shared_memory_descriptor

    @gluon.jit
    def place(self, number):
        return self.words.index(number % self.words.shape[0])

    @gluon.jit
    def write(self, number, values):
        write_words(self.place(number), values)

    @gluon.jit
    def read(self, number, I: gl.constexpr = 0):
        return read_word(self.place(number), I)


@aggregate
class Queue:
    """Slots with a channel: a record is written once all readers have released the slot's previous record."""

    slots: Slots
    channel: Channel

    @gluon.jit
    def publish(self, number, values):
        self.channel.acquire(number)
        self.slots.write(number, values)
        self.channel.commit(number)

    @gluon.jit
    def take(self, number):
        """Reader of records of one word: waits for record `number`, reads it, releases its slot."""
        self.channel.wait(number)
        word = self.slots.read(number)
        self.channel.release(number)
        return word


@gluon.jit
def make_slots(SLOTS: gl.constexpr, WORDS: gl.constexpr):
    return Slots(gl.allocate_shared_memory(gl.int32, [SLOTS, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])))


@gluon.jit
def make_queue(READERS: gl.constexpr):
    """A queue of two records of one word."""
    return Queue(make_slots(2, 1), make_channel(2, 1, READERS))
