/* The biased lock (native/pool/lock.hpp), checked exhaustively: three threads lock and unlock for
 * ever, and any of them may become its one owner. The stores of `inside` wait in a buffer of each
 * thread's processor as long as they like; an exchange empties one's own buffer, membarrier that of
 * every thread.
 */
#define NOBODY 255

byte owner = NOBODY, favourite = NOBODY;
bool inside, held, shared;
byte users;  /* ghost: threads in the section */

chan buffer[3] = [2] of { bool };

active [3] proctype Processor()
{
  do
  :: buffer[_pid] ? inside
  od
}

inline lock_shared()
{
  atomic { !held && empty(buffer[me]) -> held = true };
  if
  :: owner != NOBODY ->
     owner = NOBODY;
     empty(buffer[0]); empty(buffer[1]); empty(buffer[2]);
     !inside
  :: else
  fi;
  shared = true;
  if
  :: favourite == NOBODY || favourite == me -> favourite = me; owner = me
  :: true  /* no streak yet */
  fi
}

active [3] proctype Thread()
{
  byte me = _pid - 3;
  do
  :: if
     :: owner == me ->
        buffer[me] ! true;
        if
        :: owner == me
        :: else -> buffer[me] ! false; lock_shared()
        fi
     :: else -> lock_shared()
     fi;
     users++;
     assert(users == 1);
     users--;
     if
     :: shared -> shared = false; held = false
     :: !shared -> buffer[me] ! false
     fi
  od
}
