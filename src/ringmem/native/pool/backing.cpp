#include "pool/backing.hpp"

#include <algorithm>

namespace ringmem::pool {
namespace {

constexpr auto relaxed = std::memory_order_relaxed;

// What a second release answers when the first one, which "failed", had released.
bool is_gone(Status status) noexcept {
  return status == Status::invalid_value || status == Status::invalid_handle;
}

// Calls visit(ptr, nbytes) for each run of pieces that touch.
template <typename Visit>
Status for_each_run(const std::vector<Backing::Piece>& pieces, std::size_t count, Visit&& visit) {
  for (std::size_t i = 0; i < count;) {
    std::size_t j = i + 1;
    while (j < count && pieces[j].at == pieces[j - 1].at + pieces[j - 1].nbytes) ++j;
    const DevicePtr ptr = pieces[i].at;
    const Status status = visit(ptr, pieces[j - 1].at + pieces[j - 1].nbytes - ptr);
    if (!ok(status)) return status;
    i = j;
  }
  return Status::success;
}

}  // namespace

Backing::Backing(Driver& driver, int device, PhysicalProps props, std::vector<AccessGrant> grants)
    : driver_(driver), device_(device), props_(props), grants_(std::move(grants)), handles_(1) {}

Status Backing::find_page_bytes() noexcept {
  if (page_bytes_) return Status::success;
  counters_.calls.fetch_add(1, relaxed);
  return driver_.granularity(props_, false, &page_bytes_);
}

Status Backing::open(std::size_t nbytes, std::size_t least) noexcept {
  Status status = Status::success;
  for (; nbytes >= least; nbytes /= 2) {
    nbytes = nbytes / page_bytes_ * page_bytes_;
    counters_.calls.fetch_add(1, relaxed);
    status = driver_.address_reserve(nbytes, page_bytes_, 0, &base_);
    if (ok(status)) break;
  }
  if (!ok(status)) return status;
  nbytes_ = nbytes;
  try {
    pages_.resize(nbytes / page_bytes_, none);
  } catch (const std::exception&) {
    (void)close();
    return Status::out_of_memory;
  }
  return status;
}

Status Backing::open_chunks(std::size_t nbytes) {
  constexpr std::size_t most_chunks = 1 << 16;
  handles_.reserve(most_chunks);  // real() reads it beside a growth
  page_bytes_ = chunk_page_bytes;
  base_ = DevicePtr{1} << 60;
  nbytes_ = nbytes / page_bytes_ * page_bytes_;
  pages_.resize(nbytes_ / page_bytes_, none);
  chunked_ = true;
  return Status::success;
}

DevicePtr Backing::real_of_chunk(DevicePtr ptr) const noexcept {
  const Handle& handle = handles_[handle_at(ptr)];
  return handle.id + (ptr - handle.at);
}

DevicePtr Backing::name_of(DevicePtr real) const noexcept {
  for (const Handle& handle : handles_) {
    if (handle.at && real >= handle.id && real - handle.id < handle.nbytes) {
      return handle.at + (real - handle.id);
    }
  }
  return 0;
}

std::uint32_t Backing::new_index() {
  if (spare_.empty()) {
    handles_.emplace_back();
    spare_.reserve(handles_.capacity());  // so that a release never needs memory
    return static_cast<std::uint32_t>(handles_.size() - 1);
  }
  const std::uint32_t index = spare_.back();
  spare_.pop_back();
  return index;
}

void Backing::place(std::uint32_t index, DevicePtr at) noexcept {
  Handle& handle = handles_[index];
  const std::size_t count = handle.nbytes / page_bytes_;
  if (handle.at) {
    const auto from = pages_.begin() + static_cast<std::ptrdiff_t>((handle.at - base_) / page_bytes_);
    std::fill_n(from, count, none);
  }
  handle.at = at;
  if (at) {
    const auto to = pages_.begin() + static_cast<std::ptrdiff_t>((at - base_) / page_bytes_);
    std::fill_n(to, count, index);
  }
}

void Backing::count_reserved(std::size_t nbytes) noexcept {
  const std::size_t now = counters_.reserved.fetch_add(nbytes, relaxed) + nbytes;
  if (now > counters_.peak_reserved.load(relaxed)) counters_.peak_reserved.store(now, relaxed);
}

Status Backing::make(std::size_t nbytes, PhysicalHandle* id) noexcept {
  counters_.calls.fetch_add(1, relaxed);
  if (!chunked_) return driver_.mem_create(nbytes, props_, id);
  if (handles_.size() == handles_.capacity() && spare_.empty()) return Status::out_of_memory;
  return driver_.mem_alloc(device_, nbytes, id);
}

Status Backing::create(Piece* piece) {
  const std::uint32_t index = new_index();
  Handle& handle = handles_[index];
  handle = {0, 0, piece->nbytes};
  const Status status = make(piece->nbytes, &handle.id);
  if (!ok(status)) {
    spare_.push_back(index);
    return status;
  }
  count_reserved(piece->nbytes);
  piece->handle = index;
  return status;
}

Status Backing::grant(const std::vector<Piece>& pieces) noexcept {
  if (chunked_) return Status::success;
  return for_each_run(pieces, pieces.size(), [this](DevicePtr ptr, std::size_t nbytes) {
    counters_.calls.fetch_add(1, relaxed);
    return driver_.mem_set_access(ptr, nbytes, grants_.data(), grants_.size());
  });
}

void Backing::undo(const std::vector<Piece>& pieces, std::size_t mapped,
                   const std::vector<std::uint32_t>& created) noexcept {
  (void)for_each_run(pieces, mapped, [this](DevicePtr ptr, std::size_t nbytes) {
    undone_ &= ok(unmap(ptr, nbytes));
    return Status::success;
  });
  for (const std::uint32_t index : created) {
    const PhysicalHandle id = handles_[index].id;
    if (!ok(release(index))) {
      orphans_.push_back(id);
      spare_.push_back(index);
    }
  }
}

Status Backing::fill(const std::vector<Piece>& wanted, const char** failed) {
  undone_ = true;
  std::vector<Piece> pieces = wanted;
  std::vector<std::uint32_t> created;
  created.reserve(pieces.size());
  std::size_t mapped = 0;
  Status status = Status::success;
  // All is created before anything is mapped: running out of memory is what usually fails.
  for (Piece& piece : pieces) {
    if (piece.handle != none) continue;
    *failed = chunked_ ? "cuMemAlloc" : "cuMemCreate";
    status = create(&piece);
    if (!ok(status)) break;
    created.push_back(piece.handle);
  }
  for (; ok(status) && mapped < pieces.size(); ++mapped) {
    *failed = "cuMemMap";
    if (chunked_) continue;
    counters_.calls.fetch_add(1, relaxed);
    const Piece& piece = pieces[mapped];
    status = driver_.mem_map(piece.at, piece.nbytes, handles_[piece.handle].id);
    if (!ok(status)) break;
  }
  if (ok(status)) {
    *failed = "cuMemSetAccess";
    status = grant(pieces);
  }
  if (!ok(status)) {
    undo(pieces, mapped, created);
    return status;
  }
  for (const Piece& piece : pieces) place(piece.handle, piece.at);
  counters_.created.fetch_add(created.size(), relaxed);
  counters_.moved.fetch_add(pieces.size() - created.size(), relaxed);
  for (const Piece& piece : wanted) {
    if (piece.handle != none) counters_.moved_bytes.fetch_add(piece.nbytes, relaxed);
  }
  return status;
}

Status Backing::unmap(DevicePtr ptr, std::size_t nbytes) noexcept {
  if (chunked_) return Status::success;
  counters_.calls.fetch_add(1, relaxed);
  return driver_.mem_unmap(ptr, nbytes);
}

Status Backing::release(std::uint32_t index, bool again) noexcept {
  Handle& handle = handles_[index];
  counters_.calls.fetch_add(1, relaxed);
  Status status = chunked_ ? driver_.mem_free(device_, handle.id) : driver_.mem_release(handle.id);
  if (again && is_gone(status)) status = Status::success;  // the call that "failed" had released it
  if (!ok(status)) return status;
  counters_.reserved.fetch_sub(handle.nbytes, relaxed);
  counters_.released.fetch_add(1, relaxed);
  place(index, 0);
  spare_.push_back(index);
  return status;
}

Status Backing::close() noexcept {
  Status first = Status::success;
  const auto keep = [&first](Status status) {
    if (!ok(status) && ok(first)) first = status;
    return ok(status);
  };
  std::erase_if(orphans_, [&](PhysicalHandle id) {
    const Status status = chunked_ ? driver_.mem_free(device_, id) : driver_.mem_release(id);
    return is_gone(status) || keep(status);
  });
  if (chunked_) {
    base_ = 0;
  } else if (base_ && ok(first)) {
    counters_.calls.fetch_add(1, relaxed);
    if (keep(driver_.address_free(base_, nbytes_))) base_ = 0;
  }
  return first;
}

}  // namespace ringmem::pool
