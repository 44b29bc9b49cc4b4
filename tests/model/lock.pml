/* The biased lock (native/pool/lock.hpp), checked exhaustively: three threads lock and unlock for
 * ever, and those that found a slot become its owner at any time. The stores of `inside` wait in a
 * buffer of each thread's processor as long as they like; an exchange empties one's own buffer,
 * membarrier that of every thread.
 */
#define SLOTS 2
#define NOBODY 255
#define OWNER(thread, slot) (thread * SLOTS + slot)

byte owner = NOBODY, slot;
byte threads[SLOTS] = NOBODY;
bool inside[SLOTS], held, shared;
byte users;  /* ghost: threads in the section */

chan buffer[3] = [2] of { byte, bool };

active [3] proctype Processor()
{
  byte at;
  bool value;
  do
  :: atomic { buffer[_pid] ? at, value -> inside[at] = value; at = 0; value = 0 }
  od
}

inline lock_shared()
{
  atomic { !held && empty(buffer[me]) -> held = true };
  if
  :: owner != NOBODY ->
     owner = NOBODY;
     empty(buffer[0]); empty(buffer[1]); empty(buffer[2]);
     !inside[slot]
  :: else
  fi;
  shared = true;
  if
  :: threads[0] == NOBODY || threads[0] == me ->
     threads[0] = me; slot = 0; owner = OWNER(me, 0)
  :: threads[0] != NOBODY && threads[0] != me && (threads[1] == NOBODY || threads[1] == me) ->
     threads[1] = me; slot = 1; owner = OWNER(me, 1)
  :: true  /* no streak yet */
  fi
}

active [3] proctype Thread()
{
  byte me = _pid - 3;
  byte seen;
  do
  :: seen = owner;
     if
     :: seen != NOBODY && seen / SLOTS == me ->
        buffer[me] ! seen % SLOTS, true;
        if
        :: owner == seen
        :: else -> buffer[me] ! seen % SLOTS, false; lock_shared()
        fi
     :: else -> lock_shared()
     fi;
     seen = 0;
     users++;
     assert(users == 1);
     users--;
     if
     :: shared -> shared = false; held = false
     :: !shared -> buffer[me] ! slot, false
     fi
  od
}
