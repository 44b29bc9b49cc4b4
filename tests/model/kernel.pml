/* The life of a ring kernel, checked exhaustively: pause, drain and terminate at any moment, beside
 * messages in both directions. Rings are counters here; ring.pml checks what is inside them.
 *
 *   CAPACITY  slots of each ring
 *   MESSAGES  the host sends at most so many
 */
byte sent, taken;         /* input ring: producer's and consumer's index */
byte answered, received;  /* output ring */
bool should_terminate, should_drain, should_pause, is_paused, has_terminated;
bool host_in_state, kernel_in_state;  /* ghosts: who touches the handler's state */
bool stop_sending;

proctype Kernel()
{
  bool drain;
  do
  :: should_terminate -> break
  :: else ->
     if
     :: should_pause && !should_drain ->
        is_paused = true;
        (!should_pause || should_terminate || should_drain);
        is_paused = false
     :: else ->
        drain = should_drain;  /* read before the ring: what was sent before it is then seen */
        if
        :: taken < sent ->
           (answered - received < CAPACITY || should_terminate);
           if
           :: should_terminate -> break
           :: else ->
              kernel_in_state = true;
              assert(!host_in_state);
              kernel_in_state = false;
              taken++;
              answered++
           fi
        :: taken == sent && drain -> break
        :: taken == sent && !drain ->  /* idle */
           (taken < sent || should_drain || should_terminate || should_pause)
        fi
     fi
  od;
  has_terminated = true
}

proctype Sender(chan done)
{
  do
  :: sent < MESSAGES && !stop_sending ->
     if
     :: sent - taken < CAPACITY -> sent++
     :: sent - taken == CAPACITY ->
        (sent - taken < CAPACITY || has_terminated || stop_sending);
        if
        :: has_terminated -> break
        :: else
        fi
     fi
  :: sent == MESSAGES || stop_sending -> break
  od;
  done ! true
}

proctype Receiver()
{
  do
  :: received < answered -> received++
  :: received == answered && has_terminated -> break
  :: received == answered && !has_terminated -> (received < answered || has_terminated)
  od
}

proctype Owner(chan sender_done)
{
  do
  :: should_pause = true;
     (is_paused || has_terminated);
     if
     :: has_terminated -> break
     :: else ->
        host_in_state = true;
        assert(!kernel_in_state);
        host_in_state = false;
        should_pause = false;
        (!is_paused || has_terminated)
     fi
  :: should_terminate = true; break
  :: stop_sending = true;
     sender_done ? true;  /* drain promises for what was sent before it */
     should_drain = true;
     has_terminated;
     assert(taken == sent && answered == sent);
     break
  od;
  has_terminated
}

init
{
  chan done = [1] of { bool };
  atomic { run Kernel(); run Receiver(); run Owner(done); run Sender(done) }
}
