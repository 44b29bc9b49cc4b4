"""Virtual memory from several threads: no view of what is not there, and nothing left behind."""

import contextlib
import random

import numpy as np

from ringmem.native.errors import ClosedError, InvalidValueError
from ringmem.virtual import AddressRange, GrowableBuffer, PhysicalMemory, SparseBuffer, attach

ROW = 16384  # rows of 64 KiB: as many bytes as a page


def test_a_growable_buffer_is_resized_while_others_view_it(device, hammer):
    buffer = GrowableBuffer((64, ROW), "float32", device, shape=2)
    address = buffer.ptr

    def resize(number):
        with contextlib.suppress(InvalidValueError):  # a view needs what would go
            buffer.resize(random.randrange(2, 64))

    def view(number):
        length = len(buffer)
        try:
            rows = buffer.view(length)
        except InvalidValueError:  # it shrank meanwhile
            return
        rows[-1].fill(number)
        assert (rows[-1].to_numpy() == number).all()
        assert len(buffer) >= length

    def ahead(number):
        buffer.reserve_ahead(number % 4 * 65536)
        assert buffer.committed >= 2 * 65536
        assert (buffer.ptr, buffer.max_shape) == (address, (64, ROW))

    assert hammer.repeat(resize, resize, view, ahead) == []
    buffer.close()
    assert buffer.closed


def test_what_is_closed_while_it_is_viewed_is_refused_or_gone(device, hammer):
    for _ in range(30):
        buffer = GrowableBuffer((8, ROW), "float32", device, shape=4)

        def use(buffer=buffer):
            with contextlib.suppress(ClosedError):
                for _ in range(20):
                    rows = buffer.view(4)
                    rows.fill(1)
                    assert (rows[:1].to_numpy() == 1).all()
                    rows.close()

        def close(buffer=buffer):
            while not buffer.closed:
                with contextlib.suppress(InvalidValueError):
                    buffer.close()

        assert hammer.together(use, use, close, close) == []


def test_threads_map_and_unmap_pages_of_their_own(device, hammer):
    pages = 64
    buffer = SparseBuffer((pages, ROW), "float32", device, cache_nbytes=8 * 65536)

    def worker(own):
        def work(number):
            first = own * 16 + number % 13
            buffer.map(range(first, first + 3))
            rows = buffer.view(first, first + 3)
            rows.fill(own + 1)
            assert (rows.to_numpy() == own + 1).all()
            try:
                buffer.unmap(first + 1)
                raise AssertionError("a page went under a view")
            except InvalidValueError:
                rows.close()
            del rows
            buffer.unmap([first + 2, first, first + 1])

        return work

    assert hammer.repeat(*(worker(own) for own in range(4))) == []
    buffer.settle()
    assert buffer.mapped == []
    assert buffer.committed <= 8 * 65536
    buffer.close()


def test_a_page_that_all_threads_want_is_mapped_by_one(device, hammer):
    buffer = SparseBuffer((4, ROW), "float32", device)
    done = []

    def change(call, word):
        def body():
            with contextlib.suppress(InvalidValueError):
                call([0, 1, 2])
                done.append(word)

        return body

    for number in range(1, 60):
        assert hammer.together(*[change(buffer.map, "map")] * 4) == []
        assert hammer.together(*[change(buffer.unmap, "unmap")] * 4) == []
        assert (done.count("map"), done.count("unmap")) == (number, number)
    buffer.close()


def test_views_of_a_mapping_are_counted_exactly(device, hammer):
    with AddressRange.reserve(device, 65536) as addresses:
        memory = PhysicalMemory.create(device, 65536)
        mapping = addresses.map(memory)

        def view(number):
            rows = mapping.view(100, "int32")
            rows.fill(number)
            del rows

        assert hammer.repeat(view, view, view, view) == []
        assert mapping._views == 0
        mapping.unmap()
        memory.close()


def test_a_mapping_is_viewed_or_unmapped_and_never_both(device, hammer):
    with AddressRange.reserve(device, 65536) as addresses:
        memory = PhysicalMemory.create(device, 65536)
        for _ in range(60):
            mapping = addresses.map(memory)

            def view(mapping=mapping):
                with contextlib.suppress(ClosedError, InvalidValueError):
                    for _ in range(10):
                        rows = mapping.view(100, "int32")
                        array = np.asarray(rows)
                        array[:] = 3
                        assert not mapping.closed
                        assert "MappedRange" in repr(mapping)
                        del array, rows

            def unmap(mapping=mapping):
                while not mapping.closed:
                    with contextlib.suppress(InvalidValueError):
                        mapping.unmap()

            assert hammer.together(view, view, unmap, unmap) == []
        memory.close()


def test_a_ticket_serves_as_many_threads_as_it_has_uses(device, hammer):
    buffer = GrowableBuffer((4, ROW), "float32", device, shape=1)
    buffer.fill(5)
    for _ in range(8):
        ticket = buffer.share(uses=2)
        attached, stale = [], []

        def take(ticket=ticket, attached=attached, stale=stale):
            try:
                attached.append(attach(ticket, device))
            except ClosedError as error:
                stale.append(str(error))

        assert hammer.together(*[take] * 4) == []
        assert (len(attached), len(stale)) == (2, 2)
        for shared in attached:
            view = shared.view()
            assert (view.to_numpy() == 5).all()
            del view
            shared.close()
    buffer.close()
