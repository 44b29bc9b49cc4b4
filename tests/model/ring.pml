/* One ring, checked exhaustively: order, wrap, overflow of index and sequence, full and empty,
 * batches, closing, and ends that die at any step and are replaced.
 *
 *   CAPACITY  slots, a power of two
 *   LINES     lines of a slot, 1 or 2
 *   INDEX     values of an index before it overflows: a multiple of 2 * CAPACITY
 *   HOST      the producer stores line by line, payload before sequence (release), and may die
 *   DEVICE    the producer stores whole lines in any order, as the warps of a kernel do
 *   STREAM    the producer streams a batch past its caches: every part of every line in any order,
 *             but the first slot, which comes last, behind a fence; and may die
 *
 * The payload of every line is the index of its message, so a stale, lost, repeated or torn message
 * shows. Indices run for ever, modulo INDEX: the check has no bound on the number of messages.
 */
#ifdef STREAM
#define STEP count
#else
#define STEP 1
#endif
#define LAPS (INDEX / CAPACITY)
#define SEQUENCE(i) (((i) / CAPACITY + 1) % LAPS)
#define BEFORE(i) (((i) / CAPACITY) % LAPS)
#define DISTANCE(a, b) (((a) + INDEX - (b)) % INDEX)
#define LINE(i, l) (((i) % CAPACITY) * LINES + (l))

byte sequence[CAPACITY * LINES];
byte payload[CAPACITY * LINES];
byte tail, head;  /* published */
bool closed;

proctype Producer()
{
  byte my_tail, my_head, seen, count, slot, line, written;

attach: skip;
  d_step { count = 0; slot = 0; line = 0; written = 0; my_tail = 0; my_head = 0; seen = 0 }
  my_head = head;
  my_tail = tail;
  if
  :: DISTANCE(my_head, my_tail) != 0 && DISTANCE(my_head, my_tail) <= CAPACITY ->
     my_tail = my_head  /* consumed before tail was published */
  :: else
  fi;
  assert(DISTANCE(my_tail, my_head) <= CAPACITY);
recover:
  if
  :: DISTANCE(my_tail, my_head) < CAPACITY ->
     line = 0;
     do
     :: line < LINES && sequence[LINE(my_tail, line)] == SEQUENCE(my_tail) -> line++
     :: line < LINES && sequence[LINE(my_tail, line)] != SEQUENCE(my_tail) -> break
     :: line == LINES -> my_tail = (my_tail + 1) % INDEX; line = 0; goto recover
     od
  :: else
  fi;
#ifdef STREAM
  count = 0;  /* take back what a dead producer streamed behind a slot that is not ready */
  do
  :: count == CAPACITY - DISTANCE(my_tail, my_head) -> break
  :: else ->
     line = 0;
     do
     :: line == LINES -> break
     :: line < LINES ->
        slot = (my_tail + count) % INDEX;
        if
        :: sequence[LINE(slot, line)] == SEQUENCE(slot) -> sequence[LINE(slot, line)] = BEFORE(slot)
        :: else
        fi;
        line++
     od;
     count++
  od;
#endif
  tail = my_tail;

  do
  :: DISTANCE(my_tail, my_head) == CAPACITY ->  /* looks full: read the peer's index, wait for it */
     head != my_head;
     seen = head;
     assert(DISTANCE(seen, my_head) <= DISTANCE(my_tail, my_head));
     my_head = seen
  :: DISTANCE(my_tail, my_head) < CAPACITY ->
     select(count : 1 .. (CAPACITY - DISTANCE(my_tail, my_head)));
#ifdef DEVICE
     written = 0;  /* a bit for each line of the batch */
     do
     :: written == (1 << (count * LINES)) - 1 -> break
     :: else ->
        select(slot : 0 .. (count - 1));
        select(line : 0 .. (LINES - 1));
        skip;
        d_step {
          if
          :: (written >> (slot * LINES + line)) & 1
          :: else ->
             written = written | (1 << (slot * LINES + line));
             payload[LINE((my_tail + slot) % INDEX, line)] = (my_tail + slot) % INDEX;
             sequence[LINE((my_tail + slot) % INDEX, line)] = SEQUENCE((my_tail + slot) % INDEX)
          fi
        }
     od;
     my_tail = (my_tail + count) % INDEX;
#else
#ifdef STREAM
     written = 0;  /* two bits for each line of the batch: payload and sequence */
     do
     :: (written >> (2 * LINES)) == (1 << (2 * LINES * (count - 1))) - 1 -> break
     :: else ->
        if
        :: skip
        :: goto attach  /* killed here */
        fi;
        select(slot : 1 .. (count - 1));
        select(line : 0 .. (2 * LINES - 1));
        skip;
        d_step {
          if
          :: (written >> (slot * 2 * LINES + line)) & 1
          :: else ->
             written = written | (1 << (slot * 2 * LINES + line));
             if
             :: line < LINES ->
                payload[LINE((my_tail + slot) % INDEX, line)] = (my_tail + slot) % INDEX
             :: else ->
                sequence[LINE((my_tail + slot) % INDEX, line - LINES)] =
                  SEQUENCE((my_tail + slot) % INDEX)
             fi
          fi
        }
     od;
     slot = count - 1;  /* the fence: only the first slot is left */
#else
     slot = 0;
#endif
     do
     :: slot == count -> break
     :: slot < count ->
        line = 0;
        do
        :: line == LINES -> break
        :: line < LINES ->
           payload[LINE(my_tail, line)] = my_tail;
           if
           :: sequence[LINE(my_tail, line)] = SEQUENCE(my_tail)
           :: goto attach  /* killed here */
           fi;
           line++
        od;
        my_tail = (my_tail + STEP) % INDEX;
        slot++
     od;
     if
     :: skip
     :: goto attach  /* killed before the index was published */
     fi;
#endif
     tail = my_tail
  :: closed = true; break
  od
}

proctype Consumer()
{
  byte my_head, ready, line, seen, at;
  bool whole, ended;

attach: skip;
  d_step { line = 0; seen = 0; at = 0; whole = false; ended = false; ready = 0; my_head = 0 }
  my_head = head;
  ready = my_head;

  do
  :: DISTANCE(ready, my_head) < CAPACITY ->  /* poll one more slot */
     ended = closed;  /* read before the slot: what was committed before it is then seen */
     whole = true;
     line = 0;
     do
     :: line == LINES -> break
     :: line < LINES ->
        seen = sequence[LINE(ready, line)];
        assert(seen == SEQUENCE(ready) || seen == BEFORE(ready));
        whole = whole && seen == SEQUENCE(ready);
        line++
     od;
     if
     :: whole -> ready = (ready + 1) % INDEX
     :: !whole && ended && ready == my_head -> break
     :: !whole && !ended && ready == my_head ->  /* wait */
        (closed || (sequence[LINE(ready, 0)] == SEQUENCE(ready) &&
                    sequence[LINE(ready, LINES - 1)] == SEQUENCE(ready)))
     :: !whole && ready != my_head
     fi
  :: ready != my_head ->  /* read one message and release it */
     line = 0;
     do
     :: line == LINES -> break
     :: line < LINES -> assert(payload[LINE(my_head, line)] == my_head); line++
     od;
     my_head = (my_head + 1) % INDEX;
     if
     :: head = my_head                /* publish now … */
     :: ready != my_head              /* … or with a later one, as a batch does … */
     :: goto attach                   /* … or die first: this message comes again */
     fi
  od;
  head = my_head;
  assert(my_head == tail)  /* closed and empty: nothing was lost */
}

init { atomic { run Producer(); run Consumer() } }
