//! The arena of the expert cache: one anonymous mapping, taken once at start, lent slot by slot. Owns the mapping.
//! Never touches a byte of it; whoever borrows a slot has it alone. Surprising fact: pages become resident only as slots
//! are filled, so a cache that is larger than what a run uses costs nothing.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapOptions};

use crate::storage::reader::DestRegion;
use crate::units::Bytes;

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum SlabError {
    /// Sizes that no address space holds.
    #[error("{slots} slots of {slot_bytes} are more than an address space holds; lower the cache budget")]
    TooLarge { slots: u64, slot_bytes: Bytes },
    /// The system refused.
    #[error("cannot take {bytes} for the expert cache: {source}; lower the cache budget or free memory")]
    Refused { bytes: Bytes, source: std::io::Error },
}

/// Slots of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlabClass {
    /// Bytes of a slot, a multiple of the alignment that reads into it need.
    pub slot_bytes: Bytes,
    /// Number of slots.
    pub slots: u64,
}

/// The arena, cut into slots. The mapping lives as long as any slot of it.
pub struct Slabs {
    /// By class, in address order. Each slot is a loan of its own.
    pub slots: Vec<Vec<DestRegion>>,
    /// Bytes mapped: the sum of all slots.
    pub arena: Bytes,
    /// Whether the system took the advice to use huge pages.
    pub is_huge_advised: bool,
    /// The arena in runs of whole slots, for a device that wants to know it.
    pub pieces: Vec<Piece>,
}

/// Most bytes of a piece, unless one slot is larger: devices register memory in pieces, and a transfer must lie within one.
const PIECE_BYTES_MAX: usize = 256 << 20;

/// A run of whole slots, kept mapped.
#[derive(Clone)]
pub struct Piece {
    /// Address of the first byte.
    pub start: usize,
    /// Bytes.
    pub len: usize,
    /// Keeps the mapping.
    pub owner: Arc<dyn Any + Send + Sync>,
}

impl Slabs {
    /// Maps the arena and cuts it.
    pub fn allocate(classes: &[SlabClass]) -> Result<Self, SlabError> {
        let bytes = arena_bytes(classes)?;
        let refused = |source| SlabError::Refused { bytes: Bytes(bytes as u64), source };
        // A mapping of no bytes is not possible; a model without experts gets a page that it never touches.
        let map = MmapOptions::new().len(bytes.max(1)).map_anon().map_err(refused)?;
        let is_huge_advised = map.advise(Advice::HugePage).is_ok();
        let (slots, pieces) = cut(map, classes);
        Ok(Self { slots, arena: Bytes(bytes as u64), is_huge_advised, pieces })
    }
}

/// Sum of all slots, checked to fit an address space.
fn arena_bytes(classes: &[SlabClass]) -> Result<usize, SlabError> {
    let mut sum = 0usize;
    for &SlabClass { slot_bytes, slots } in classes {
        let too_large = SlabError::TooLarge { slots, slot_bytes };
        let class = slots.checked_mul(slot_bytes.0).and_then(|bytes| usize::try_from(bytes).ok());
        // Pointer offsets are signed: half the address space is the limit.
        match class.and_then(|bytes| sum.checked_add(bytes)).filter(|&bytes| bytes <= isize::MAX as usize) {
            Some(bytes) => sum = bytes,
            None => return Err(too_large),
        }
    }
    Ok(sum)
}

fn cut(mut map: MmapMut, classes: &[SlabClass]) -> (Vec<Vec<DestRegion>>, Vec<Piece>) {
    let base = NonNull::new(map.as_mut_ptr()).expect("a mapping is never at address 0");
    // From here on the map is only kept, never dereferenced.
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(map);
    let mut offset = 0;
    let mut all = Vec::with_capacity(classes.len());
    let mut pieces: Vec<Piece> = Vec::new();
    for class in classes {
        let slot_bytes = class.slot_bytes.0 as usize;
        let mut slots = Vec::with_capacity(class.slots as usize);
        for _ in 0..class.slots {
            // SAFETY: `offset + slot_bytes` is at most the sum that `arena_bytes` mapped, so the address stays inside.
            let start = unsafe { base.add(offset) };
            // SAFETY: the range is mapped zeroed memory inside `owner`'s mapping; `offset` grows by the slot's length, so
            // no two regions overlap; the mapping is moved into `owner`, and nobody reads it but through regions.
            slots.push(unsafe { DestRegion::from_raw(start, slot_bytes, Arc::clone(&owner)) });
            match pieces.last_mut() {
                Some(piece) if piece.len + slot_bytes <= PIECE_BYTES_MAX => piece.len += slot_bytes,
                _ => pieces.push(Piece {
                    start: start.as_ptr().expose_provenance(),
                    len: slot_bytes,
                    owner: Arc::clone(&owner),
                }),
            }
            offset += slot_bytes;
        }
        all.push(slots);
    }
    (all, pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_disjoint_and_outlive_the_arena_value() {
        let classes =
            [SlabClass { slot_bytes: Bytes(8192), slots: 3 }, SlabClass { slot_bytes: Bytes(4096), slots: 2 }];
        let Slabs { mut slots, arena, .. } = Slabs::allocate(&classes).unwrap();
        assert_eq!(arena, Bytes(3 * 8192 + 2 * 4096));
        for (number, slot) in slots.iter_mut().flatten().enumerate() {
            assert!(slot.is_aligned_to(4096) && slot.bytes().iter().all(|&b| b == 0));
            slot.bytes_mut().fill(number as u8 + 1);
        }
        let lens: Vec<usize> = slots.iter().flatten().map(DestRegion::len).collect();
        assert_eq!(lens, [8192, 8192, 8192, 4096, 4096]);
        for (number, slot) in slots.iter().flatten().enumerate() {
            assert!(slot.bytes().iter().all(|&b| b == number as u8 + 1), "slot {number}");
        }
        let last = slots.pop().unwrap().pop().unwrap();
        drop(slots);
        assert!(last.bytes().iter().all(|&b| b == 5));
    }

    #[test]
    fn pieces_are_whole_slots_and_cover_the_arena() {
        let (large, small) = (Bytes(100 << 20), Bytes(4096));
        let classes = [SlabClass { slot_bytes: large, slots: 5 }, SlabClass { slot_bytes: small, slots: 3 }];
        let Slabs { slots, arena, pieces, .. } = Slabs::allocate(&classes).unwrap();
        assert_eq!(pieces.iter().map(|p| p.len as u64).sum::<u64>(), arena.0);
        assert!(pieces.iter().all(|p| p.len <= PIECE_BYTES_MAX));
        for slot in slots.iter().flatten() {
            let at = slot.bytes().as_ptr() as usize;
            assert!(pieces.iter().any(|p| p.start <= at && at + slot.len() <= p.start + p.len));
        }
        let vast = Slabs::allocate(&[SlabClass { slot_bytes: Bytes(300 << 20), slots: 2 }]).unwrap();
        assert_eq!(vast.pieces.len(), 2, "a slot is never split");
    }

    #[test]
    fn a_slot_reunites_alone() {
        let mut slabs = Slabs::allocate(&[SlabClass { slot_bytes: Bytes(4096), slots: 2 }]).unwrap();
        let mut slot = slabs.slots[0].pop().unwrap();
        let tail = slot.split_off(100);
        drop(slot);
        assert_eq!(tail.reunite().unwrap().len(), 4096);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        for (slot_bytes, slots) in [(u64::MAX, 1), (1 << 40, 1 << 40), (1 << 62, 2)] {
            let err = Slabs::allocate(&[SlabClass { slot_bytes: Bytes(slot_bytes), slots }]).err();
            assert!(matches!(err, Some(SlabError::TooLarge { .. })), "{slot_bytes} x {slots}");
        }
        let err = Slabs::allocate(&[SlabClass { slot_bytes: Bytes(1 << 50), slots: 8 }]).err();
        assert!(matches!(err, Some(SlabError::Refused { .. })));
        assert_eq!(Slabs::allocate(&[]).unwrap().arena, Bytes(0));
    }
}
