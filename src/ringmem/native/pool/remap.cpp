// How free pages move: find the run of addresses that lacks least, find free handles to fill it
// with, map them there, and leave their old addresses to be unmapped when nobody can use them.
#include <algorithm>

#include "pool/pages.hpp"

namespace ringmem::pool {
namespace {

bool usable(const StreamOrder& streams, const Node& node) noexcept {
  return node.is(NodeState::hole) ||
         (node.is(NodeState::free) && streams.orderable(node.tag));
}

}  // namespace

// --- the window: where the run shall be ----------------------------------------------------------

Pages::Window Pages::end_window(Space& space, std::uint32_t units) const {
  Window window;
  std::size_t lacking = std::size_t{units} * unit_bytes;
  Node* tail = space.tail();
  if (tail && streams_.orderable(tail->tag)) {
    window.parts.push_back(tail);
    lacking -= std::min(lacking, tail->nbytes());
  }
  window.append = window.missing = round_up(lacking, backing_.page_bytes());
  return window;
}

// Looks for the stretch of free nodes and holes around each hole that needs the fewest new pages.
Pages::Window Pages::find_window(Space& space, std::uint32_t units) const {
  constexpr int hole_limit = 512;
  const std::size_t page = backing_.page_bytes();
  const std::size_t need = std::size_t{units} * unit_bytes;
  Window found = end_window(space, units);
  if (found.append > space.room()) found.missing = SIZE_MAX;
  std::vector<Node*> run;
  int looked = 0;
  for (Node* hole = space.holes(); hole && looked < hole_limit; hole = hole->bin_next, ++looked) {
    Node* first = hole;
    for (std::size_t have = 0; have < need && first->prev && usable(streams_, *first->prev);) {
      first = first->prev;
      have += first->nbytes();
    }
    run.clear();
    std::size_t total = 0;
    std::size_t after = 0;
    bool past = false;
    for (Node* node = first; node && usable(streams_, *node) && after < need; node = node->next) {
      run.push_back(node);
      total += node->nbytes();
      if (past) after += node->nbytes();
      past |= node == hole;
    }
    if (total < need) continue;
    const auto consider = [&](std::size_t i, std::size_t j, std::size_t have, std::size_t holes,
                              bool cut_front) {
      // What is more than needed stays out of the window, at one end of it.
      const Node* edge = run[cut_front ? i : j];
      const std::size_t unused = (have - need) / page * page;
      if (unused >= edge->nbytes()) return;
      const std::size_t missing = holes - (edge->is(NodeState::hole) ? unused : 0);
      if (missing >= found.missing) return;
      found.missing = missing;
      found.append = 0;
      found.skip_front = cut_front ? unused : 0;
      found.skip_back = cut_front ? 0 : unused;
      found.parts.assign(run.begin() + static_cast<std::ptrdiff_t>(i),
                         run.begin() + static_cast<std::ptrdiff_t>(j) + 1);
    };
    // Every shortest stretch [i, j]: two indices that only move forward.
    std::size_t have = 0;
    std::size_t holes = 0;
    std::size_t i = 0;
    for (std::size_t j = 0; j < run.size(); ++j) {
      have += run[j]->nbytes();
      if (run[j]->is(NodeState::hole)) holes += run[j]->nbytes();
      if (have < need) continue;
      while (have - run[i]->nbytes() >= need) {
        have -= run[i]->nbytes();
        if (run[i]->is(NodeState::hole)) holes -= run[i]->nbytes();
        ++i;
      }
      consider(i, j, have, holes, false);
      consider(i, j, have, holes, true);
    }
  }
  return found;
}

// Takes the window's nodes out of the space: all busy from here on.
void Pages::claim(Space& space, Window* window) {
  const auto leave = [&](Node* node, bool free) {
    if (free) space.give(node, node->tag);
    else space.become_hole(node);
  };
  for (std::size_t i = 0; i < window->parts.size(); ++i) {
    Node*& node = window->parts[i];
    const bool free = node->is(NodeState::free);
    window->was_free.push_back(free);
    if (free) {
      window->tag = joined(window->tag, node->tag);
      space.detach(node);
    } else {
      space.detach_hole(node);
    }
    if (i == 0 && window->skip_front) {
      Node* rest = space.cut(node, static_cast<std::uint32_t>(window->skip_front / unit_bytes));
      leave(node, free);
      node = rest;
    }
    if (i + 1 == window->parts.size() && window->skip_back) {
      const std::size_t keep = node->nbytes() - window->skip_back;
      leave(space.cut(node, static_cast<std::uint32_t>(keep / unit_bytes)), free);
    }
  }
  if (window->append) {
    window->parts.push_back(space.append(window->append));
    window->was_free.push_back(false);
  }
}

// --- the sources: free handles elsewhere ----------------------------------------------------------

// Takes handles off the end of `node` while they fit into `lacking`; the piece cut off is busy.
std::size_t Pages::take_source(Space& space, Node* node, std::size_t lacking, Plan* plan) {
  const std::size_t page = backing_.page_bytes();
  const DevicePtr base = backing_.base();
  const DevicePtr low = base + round_up(node->ptr - base, page);
  DevicePtr high = base + (node->end() - base) / page * page;
  while (high > low) {  // skip a handle that reaches out of the node
    const Backing::Handle& handle = backing_.handle(backing_.handle_at(high - page));
    if (handle.at + handle.nbytes <= high && handle.nbytes <= lacking) break;
    high = std::min(high - page, handle.at);
  }
  if (high <= low) return 0;
  DevicePtr from = high;
  std::size_t taken = 0;
  while (from > low) {
    const std::uint32_t index = backing_.handle_at(from - page);
    const Backing::Handle& handle = backing_.handle(index);
    if (handle.at < low || taken + handle.nbytes > lacking) break;
    from = handle.at;
    taken += handle.nbytes;
    plan->handles.push_back(index);
  }
  if (taken == 0) return 0;
  const Tag tag = node->tag;
  space.detach(node);
  if (from > node->ptr) {
    Node* front = node;
    node = space.cut(front, static_cast<std::uint32_t>((from - front->ptr) / unit_bytes));
    if (node->end() > high) {
      space.give(space.cut(node, static_cast<std::uint32_t>((high - from) / unit_bytes)), tag);
    }
    space.give(front, tag);
  } else if (node->end() > high) {
    space.give(space.cut(node, static_cast<std::uint32_t>((high - from) / unit_bytes)), tag);
  }
  plan->sources.push_back({&space, node, tag});
  return taken;
}

// Fills `lacking` bytes as far as free handles go; returns what is left.
std::size_t Pages::find_sources(std::size_t lacking, Plan* plan) {
  const auto page_units = static_cast<std::uint32_t>(backing_.page_bytes() / unit_bytes);
  for (Space* space : {&heap_.medium, &heap_.large}) {
    std::vector<Node*> nodes;
    space->for_each_free(page_units, [&](Node* node) {
      if (streams_.orderable(node->tag)) nodes.push_back(node);
    });
    std::sort(nodes.begin(), nodes.end(),
              [](const Node* a, const Node* b) { return a->units < b->units; });
    for (Node* node : nodes) {
      if (lacking == 0) return 0;
      lacking -= take_source(*space, node, lacking, plan);
    }
  }
  return lacking;
}

// --- the plan --------------------------------------------------------------------------------------

// How much of what a run lacks is created though free pages could move there. Moving costs as much
// as creating, and room that is left is used up sooner or later, behind the run: then the run lies
// in the middle, where it can never be extended. The last 1/64 is for what is small.
std::size_t Pages::fresh_bytes(std::size_t lacking, std::size_t budget, bool all) const noexcept {
  if (options_.tight) return 0;
  const std::size_t spared = all ? 0 : most_bytes() / 64;
  return std::min(budget > spared ? budget - spared : 0, lacking) / backing_.page_bytes() *
         backing_.page_bytes();
}

// Whether the plan leaves so little that what large handles hold in vain counts.
bool Pages::leaves_little(const Plan& plan) const {
  std::size_t left = room();
  for (const Backing::Piece& piece : plan.pieces) {
    if (piece.handle == Backing::none) left -= std::min(left, piece.nbytes);
  }
  const auto page_units = static_cast<std::uint32_t>(backing_.page_bytes() / unit_bytes);
  for (const Space* space : {&heap_.medium, &heap_.large}) {
    space->for_each_free(page_units, [&](const Node* node) {
      for_each_handle(*node, [&](std::uint32_t index) { left += backing_.handle(index).nbytes; });
    });
  }
  return left < most_bytes() / 32;
}

// The handles of the plan that are larger than a page and could be given back at once; `pending`:
// whose work must be done before more could.
std::vector<std::uint32_t> Pages::large_sources(const Plan& plan, Tag* pending) const {
  std::vector<std::uint32_t> large;
  for (const Source& source : plan.sources) {
    if (!streams_.complete(source.tag)) {
      *pending = joined(*pending, source.tag);
      continue;
    }
    for_each_handle(*source.node, [&](std::uint32_t index) {
      if (backing_.handle(index).nbytes > backing_.page_bytes()) large.push_back(index);
    });
  }
  return large;
}

// What fills the holes of the window; false if there is not enough. Under the heap lock.
bool Pages::plan_pieces(Attempt* attempt, Plan* plan) {
  std::size_t budget = attempt->budget;
  for (std::size_t i = 0; i < plan->window.parts.size(); ++i) {
    if (plan->window.was_free[i]) continue;
    const Node* part = plan->window.parts[i];
    const std::size_t first = plan->handles.size();
    const std::size_t fresh = fresh_bytes(part->nbytes(), budget, attempt->fine);
    const std::size_t left = fresh + find_sources(part->nbytes() - fresh, plan);
    DevicePtr at = part->ptr;
    for (std::size_t k = first; k < plan->handles.size(); ++k) {
      const std::size_t nbytes = backing_.handle(plan->handles[k]).nbytes;
      plan->pieces.push_back({at, nbytes, plan->handles[k]});
      at += nbytes;
    }
    if (left > budget) {
      attempt->lacking = left - budget;
      if (const std::uint32_t one = find_unfit(attempt->lacking)) attempt->unfit = {one};
      return false;
    }
    budget -= left;
    cut_pieces(at, left, attempt->fine, &plan->pieces);
  }
  if (attempt->fine || !leaves_little(*plan)) return true;
  // Now that every page counts, what moves becomes single pages, if it can be had that way.
  attempt->unfit = large_sources(*plan, &attempt->pending);
  attempt->fine = !attempt->unfit.empty();
  return !attempt->fine;
}

// --- the move --------------------------------------------------------------------------------------

Node* Pages::remap(Space& space, std::uint32_t units, Attempt* attempt, Status* status,
                   const char** failed) {
  attempt->lacking = 0;
  attempt->unfit.clear();
  Plan plan{&space, {}, {}, {}, {}};
  *failed = nullptr;
  *status = Status::success;
  {
    const BiasedGuard guard(heap_.lock);
    plan.window = find_window(space, units);
    if (plan.window.missing == SIZE_MAX) return nullptr;
    claim(space, &plan.window);
    if (!plan_pieces(attempt, &plan)) {
      roll_back_locked(&plan, true);
      return nullptr;
    }
  }
  *status = backing_.fill(plan.pieces, failed);
  if (!ok(*status)) {
    roll_back(&plan);
    return nullptr;
  }
  return commit(&plan, units);
}

// Gives handles back that are still free, so that as much can be created in other sizes.
std::size_t Pages::give_up(const std::vector<std::uint32_t>& handles) {
  std::size_t given_up = 0;
  for (const std::uint32_t index : handles) {
    const Backing::Handle handle = backing_.handle(index);
    std::unique_lock guard(heap_.lock);
    Node* home = heap_.covering(handle.at);
    if (!home || !home->is(NodeState::free) || home->end() < handle.at + handle.nbytes) {
      continue;  // somebody has allocated it meanwhile
    }
    const Leaving leaving = isolate(index, home);
    guard.unlock();
    if (ok(send_back(leaving))) given_up += handle.nbytes;
  }
  return given_up;
}

// A free handle of at least `nbytes`, or else the largest one: given back to the driver, it leaves
// room to create the sizes that are needed. Under the heap lock.
std::uint32_t Pages::find_unfit(std::size_t nbytes) const {
  std::uint32_t found = Backing::none;
  const auto page_units = static_cast<std::uint32_t>(backing_.page_bytes() / unit_bytes);
  for (const Space* space : {&heap_.medium, &heap_.large}) {
    space->for_each_free(page_units, [&](const Node* node) {
      if (!streams_.complete(node->tag)) return;
      for_each_handle(*node, [&](std::uint32_t index) {
        const std::size_t size = backing_.handle(index).nbytes;
        const std::size_t best = found ? backing_.handle(found).nbytes : 0;
        const bool better = best < nbytes ? size > best : size >= nbytes && size < best;
        if (better) found = index;
      });
    });
  }
  return found;
}

// Cuts a handle out of the free node it lies in. Under the heap lock.
Pages::Leaving Pages::isolate(std::uint32_t index, Node* home) {
  const Backing::Handle& handle = backing_.handle(index);
  Space& space = heap_.space_of(*home);
  const Tag tag = home->tag;
  space.detach(home);
  Node* node = home;
  if (handle.at > home->ptr) {
    node = space.cut(home, static_cast<std::uint32_t>((handle.at - home->ptr) / unit_bytes));
  }
  if (node->nbytes() > handle.nbytes) {
    space.give(space.cut(node, static_cast<std::uint32_t>(handle.nbytes / unit_bytes)), tag);
  }
  if (node != home) space.give(home, tag);
  return {index, node, tag};
}

// Releases it; its addresses are unmapped once nobody can use them. Without the heap lock.
Status Pages::send_back(const Leaving& leaving) {
  const bool complete = streams_.complete(leaving.tag);
  // A chunk that is freed is gone at once, unlike a handle that is mapped.
  const bool wait = backing_.chunked() && !complete;
  const Status status = wait ? Status::not_ready : backing_.release(leaving.handle);
  const bool unmapped = ok(status) && complete &&
                        ok(backing_.unmap(leaving.node->ptr, leaving.node->nbytes()));
  const BiasedGuard guard(heap_.lock);
  Space& space = heap_.space_of(*leaving.node);
  if (unmapped) {
    space.become_hole(leaving.node);
  } else {
    space.become_stale(leaving.node);
    stale_.push_back({leaving.node, leaving.tag, ok(status) ? Backing::none : leaving.handle});
  }
  return wait ? Status::success : status;
}

// --- afterwards --------------------------------------------------------------------------------------

// The window becomes one node: its first `units` live, the rest free. The live node's tag says what
// its user must be ordered after.
Node* Pages::commit(Plan* plan, std::uint32_t units) {
  Space& space = *plan->space;
  Tag tag = plan->window.tag;
  for (const Source& source : plan->sources) tag = joined(tag, source.tag);
  Node* node = plan->window.parts.front();
  {
    const BiasedGuard guard(heap_.lock);
    for (std::size_t i = 1; i < plan->window.parts.size(); ++i) space.absorb_next(node);
    if (node->units > units) space.give(space.cut(node, units), tag);
    node->tag = tag;
    node->become(NodeState::live);
    for (const Source& source : plan->sources) {
      source.space->become_stale(source.node);
      stale_.push_back({source.node, source.tag, Backing::none});
    }
  }
  return node;
}

void Pages::roll_back(Plan* plan) {
  const BiasedGuard guard(heap_.lock);
  roll_back_locked(plan, backing_.undone());
}

void Pages::roll_back_locked(Plan* plan, bool unmapped) {
  Window& window = plan->window;
  for (const Source& source : plan->sources) source.space->give(source.node, source.tag);
  for (std::size_t i = window.parts.size(); i-- > 0;) {
    Node* node = window.parts[i];
    if (window.was_free[i]) {
      plan->space->give(node, node->tag);
    } else if (unmapped) {
      plan->space->become_hole(node);
    } else {
      plan->space->become_stale(node);
      stale_.push_back({node, {}, Backing::none});
    }
  }
}

}  // namespace ringmem::pool
