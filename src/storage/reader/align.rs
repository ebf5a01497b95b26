//! Memory that reads land in, and the arithmetic of direct I/O alignment. Owns `DestRegion`, the exclusive loan of a byte
//! range; never reads a file. Surprising fact: a region is split into pieces that land on different threads, and the last
//! piece left alive may take the whole region back, because being the only piece proves that nobody else can touch it.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

/// What the file system asks of a direct read; 1 everywhere for buffered reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alignment {
    /// File offsets and lengths are multiples of this many bytes. A power of two.
    pub offset: u32,
    /// Memory addresses are multiples of this many bytes. A power of two, at most a page.
    pub memory: u32,
}

/// Where the data of one read lies inside its region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    /// File offset of the region's byte 0: the wanted offset rounded down.
    pub file_offset: u64,
    /// Bytes the region must hold: the aligned superset of the wanted range.
    pub region_bytes: usize,
    /// Byte of the region at which the wanted data begins.
    pub skew: usize,
}

impl Alignment {
    /// Buffered reads: any offset, any address.
    pub const NONE: Self = Self { offset: 1, memory: 1 };

    /// Distance between two places of a region at which a read may begin: each is aligned in the file and in memory.
    pub fn step(self) -> u32 {
        self.offset.max(self.memory)
    }

    /// The aligned superset of `[offset, offset + len)`. `None` when it overflows.
    pub fn place(self, offset: u64, len: u64) -> Option<Placement> {
        let align = u64::from(self.offset);
        let start = offset - offset % align;
        let end = offset.checked_add(len)?.checked_next_multiple_of(align)?;
        let region_bytes = usize::try_from(end - start).ok()?;
        Some(Placement { file_offset: start, region_bytes, skew: (offset - start) as usize })
    }

    /// Bytes that hold a read of `len` bytes at any offset: what a slot reserves before the offset is known.
    pub fn region_bytes_max(self, len: u64) -> Option<usize> {
        let align = u64::from(self.offset);
        usize::try_from(len.checked_add(align - 1)?.checked_next_multiple_of(align)?).ok()
    }
}

/// The loan that every piece of one region shares.
struct Loan {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the memory mapped until the last piece is gone.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a loan only carries the pointer; the bytes are reached through regions, each the sole access to its own range (duty
// of `from_raw`, kept by `split_off`, `seal` and `reunite`), read through `&DestRegion` and written through `&mut DestRegion`.
unsafe impl Send for Loan {}
// SAFETY: as above; sharing the pointer gives no access to the bytes.
unsafe impl Sync for Loan {}

/// An exclusive, owned loan of a byte range: whoever holds it may read and write the bytes, nobody else may touch them.
/// Handed to a reader with a request and handed back with its result. Not `Clone`.
pub struct DestRegion {
    loan: Arc<Loan>,
    offset: usize,
    bytes: usize,
}

impl DestRegion {
    /// Lends `[start, start + bytes)` until the region and all its pieces are dropped.
    ///
    /// # Safety
    /// - The range is mapped, readable, writable and initialised (any value) for as long as `owner` lives.
    /// - Until the last piece is dropped nobody else reads or writes the range, nor makes another region over any of it.
    pub unsafe fn from_raw(start: NonNull<u8>, bytes: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { loan: Arc::new(Loan { start, bytes, _owner: owner }), offset: 0, bytes }
    }

    /// A fresh zeroed region of `bytes`, aligned to a page. Errors when the system has no memory for it.
    pub fn anonymous(bytes: usize) -> std::io::Result<Self> {
        let mut map = MmapMut::map_anon(bytes.max(1))?;
        let start = NonNull::new(map.as_mut_ptr()).expect("a mapping is never at address 0");
        // SAFETY: the mapping is moved into the owner and no other reference to its bytes exists.
        Ok(unsafe { Self::from_raw(start, bytes, Arc::new(map)) })
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the region holds no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the first byte sits at a multiple of `align` (a power of two).
    pub fn is_aligned_to(&self, align: u32) -> bool {
        self.address().addr().get().is_multiple_of(align as usize)
    }

    /// Address of the first byte, for handing to the kernel.
    pub(super) fn address(&self) -> NonNull<u8> {
        // SAFETY: `offset` never exceeds `loan.bytes`, so the sum stays inside the lent range or one past its end.
        unsafe { self.loan.start.add(self.offset) }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the region is the sole access to this range, and `&self` keeps writers out.
        unsafe { std::slice::from_raw_parts(self.address().as_ptr(), self.bytes) }
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the region is the sole access to this range, and `&mut self` makes this borrow the sole use of it.
        unsafe { std::slice::from_raw_parts_mut(self.address().as_ptr(), self.bytes) }
    }

    /// Cuts the region at `at`: the returned piece holds `[at, len)`, `self` keeps `[0, at)`. Panics when `at > len`.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.bytes, "split at {at} of a region of {} bytes", self.bytes);
        let tail = Self { loan: Arc::clone(&self.loan), offset: self.offset + at, bytes: self.bytes - at };
        self.bytes = at;
        tail
    }

    /// The same bytes as a loan of their own, so that pieces cut from it reunite to exactly this region and no further.
    pub fn seal(self) -> Self {
        let bytes = self.bytes;
        let start = self.address();
        // SAFETY: the new loan owns `self`, which is the sole access to the range, keeps it mapped, and is never used again.
        unsafe { Self::from_raw(start, bytes, Arc::new(self)) }
    }

    /// Takes back the whole range that was lent, when this is the last piece of it. `Err` gives the piece back.
    pub fn reunite(mut self) -> Result<Self, Self> {
        // The only handle to the loan is ours, so no other piece exists and none can be made meanwhile.
        match Arc::get_mut(&mut self.loan) {
            Some(loan) => {
                self.bytes = loan.bytes;
                self.offset = 0;
                Ok(self)
            }
            None => Err(self),
        }
    }
}

impl std::fmt::Debug for DestRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DestRegion").field("offset", &self.offset).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_is_the_smallest_aligned_superset() {
        for align in [1u32, 512, 4096] {
            let alignment = Alignment { offset: align, memory: align };
            for offset in [0u64, 1, 511, 512, 2048, 4095, 4096, 3_041_280, 3_041_280 * 383] {
                for len in [1u64, 264, 512, 4096, 3_041_280] {
                    let p = alignment.place(offset, len).unwrap();
                    assert_eq!(p.file_offset % u64::from(align), 0);
                    assert_eq!(p.region_bytes as u64 % u64::from(align), 0);
                    assert_eq!(p.file_offset + p.skew as u64, offset);
                    assert!(p.skew < align as usize);
                    let end = p.file_offset + p.region_bytes as u64;
                    assert!(end >= offset + len && end - (offset + len) < u64::from(align));
                    assert!(p.region_bytes <= alignment.region_bytes_max(len).unwrap());
                }
            }
        }
    }

    #[test]
    fn placement_refuses_overflow() {
        let alignment = Alignment { offset: 4096, memory: 4096 };
        assert_eq!(alignment.place(u64::MAX - 10, 100), None);
        assert_eq!(alignment.place(u64::MAX - 10, 5), None);
        assert_eq!(alignment.region_bytes_max(u64::MAX), None);
    }

    #[test]
    fn pieces_share_bytes_and_only_the_last_takes_all_back() {
        let mut head = DestRegion::anonymous(10_000).unwrap();
        let mut tail = head.split_off(4096);
        let end = tail.split_off(4096);
        head.bytes_mut().fill(1);
        tail.bytes_mut().fill(2);
        assert_eq!((head.len(), tail.len(), end.len()), (4096, 4096, 1808));
        let head = head.reunite().expect_err("two more pieces live");
        drop(end);
        drop(head);
        let whole = tail.reunite().expect("the last piece");
        assert_eq!(whole.len(), 10_000);
        assert_eq!((whole.bytes()[4095], whole.bytes()[4096], whole.bytes()[9_999]), (1, 2, 0));
    }

    #[test]
    fn a_sealed_piece_reunites_to_itself_only() {
        let mut head = DestRegion::anonymous(10_000).unwrap();
        let mut sealed = head.split_off(1000).seal();
        let tail = sealed.split_off(5000);
        drop(head);
        drop(sealed);
        let mut tail = tail.reunite().expect("the last piece of the sealed loan");
        assert_eq!(tail.len(), 9000);
        tail.bytes_mut().fill(7);
    }

    #[test]
    fn the_owner_lives_as_long_as_any_piece() {
        struct Flag(Arc<std::sync::atomic::AtomicBool>, MmapMut);
        impl Drop for Flag {
            fn drop(&mut self) {
                self.0.store(true, std::sync::atomic::Ordering::SeqCst);
            }
        }
        let freed = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let mut flag = Flag(Arc::clone(&freed), MmapMut::map_anon(8192).unwrap());
        let start = NonNull::new(flag.1.as_mut_ptr()).unwrap();
        // SAFETY: the mapping lives in the owner and is not touched otherwise.
        let mut region = unsafe { DestRegion::from_raw(start, 8192, Arc::new(flag)) };
        let tail = region.split_off(100);
        drop(region);
        assert!(!freed.load(std::sync::atomic::Ordering::SeqCst));
        drop(tail);
        assert!(freed.load(std::sync::atomic::Ordering::SeqCst));
    }
}
