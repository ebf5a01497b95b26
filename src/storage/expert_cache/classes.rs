//! Size classes of experts and the place of an expert's three parts inside a slot. Owns the padding rule.
//! Never looks at quantisation: two layers share slots when their experts have the same number of bytes.
//! Surprising fact: a slot is sized by the worst skew that occurs in the file, not by the worst that could.

use cache_policy::ClassShape;
use cache_policy::plan::ClassRequest;

use crate::storage::layout::LayerExperts;
use crate::storage::reader::{Alignment, Placement};
use crate::units::{Bytes, ExpertIdx, ExpertKey, LayerIdx};

/// Experts whose bytes lie where no file can reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// Offsets beyond 64 bits.
    #[error("{key} lies beyond the end of any file; the model file is damaged, fetch it again")]
    Unreachable {
        /// The expert.
        key: ExpertKey,
    },
    /// A layer is listed twice.
    #[error("layer {} lists its experts twice; the model file is damaged, fetch it again", layer.0)]
    Twice {
        /// The layer.
        layer: LayerIdx,
    },
    /// A layer without experts, or an expert without bytes.
    #[error("layer {} has no expert bytes; the model file is damaged, fetch it again", layer.0)]
    Empty {
        /// The layer.
        layer: LayerIdx,
    },
}

/// Layers whose experts have the same number of bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SizeClass {
    /// Bytes of one expert.
    pub expert_bytes: Bytes,
    /// Bytes of one slot: any expert of the class with its padding.
    pub slot_bytes: Bytes,
    /// Layers, rising, with their number of experts.
    pub layers: Vec<(LayerIdx, u16)>,
}

impl SizeClass {
    /// Experts of all layers of the class.
    pub fn experts(&self) -> u64 {
        self.layers.iter().map(|&(_, experts)| u64::from(experts)).sum()
    }

    /// What the planner needs to know.
    pub fn request(&self) -> ClassRequest {
        ClassRequest {
            expert_bytes: self.expert_bytes,
            slot_bytes: self.slot_bytes,
            layers: self.layers.len() as u64,
            experts: self.experts(),
        }
    }

    /// The class with a number of slots, as policies and simulators see it.
    pub fn shape(&self, slots: usize) -> ClassShape {
        ClassShape { layers: self.layers.clone(), slots }
    }
}

/// Bytes at whose multiples parts begin at least, so that a part is aligned for its numbers as its file offset is.
const PART_STEP: usize = 64;

/// Where the three parts of one expert lie: reads in order gate, up, down, each with the room it takes in the slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotPlan {
    /// Bytes from the start of each part to the start of the next.
    pub strides: [usize; 3],
}

/// The slot plan of one expert; `None` on overflow.
pub(super) fn slot_plan(layer: &LayerExperts, expert: ExpertIdx, alignment: Alignment) -> Option<SlotPlan> {
    let step = PART_STEP.max(alignment.offset as usize).max(alignment.memory as usize);
    let mut strides = [0; 3];
    for (stride, tensor) in strides.iter_mut().zip([&layer.gate, &layer.up, &layer.down]) {
        let offset = u64::from(expert.0).checked_mul(tensor.slice_bytes)?.checked_add(tensor.offset)?;
        let Placement { region_bytes, .. } = alignment.place(offset, tensor.slice_bytes)?;
        *stride = region_bytes.checked_next_multiple_of(step)?;
    }
    Some(SlotPlan { strides })
}

/// Groups the layers by bytes of an expert, larger experts first, and sizes their slots for reads of `alignment`.
pub fn size_classes(layout: &[LayerExperts], alignment: Alignment) -> Result<Vec<SizeClass>, LayoutError> {
    let mut classes: Vec<SizeClass> = Vec::new();
    for (at, layer) in layout.iter().enumerate() {
        if layout[..at].iter().any(|l| l.layer == layer.layer) {
            return Err(LayoutError::Twice { layer: layer.layer });
        }
        let slices = [layer.gate.slice_bytes, layer.up.slice_bytes, layer.down.slice_bytes];
        if layer.experts == 0 || slices.contains(&0) {
            return Err(LayoutError::Empty { layer: layer.layer });
        }
        let mut slot_bytes = 0u64;
        for expert in (0..layer.experts).map(ExpertIdx) {
            let unreachable = || LayoutError::Unreachable { key: ExpertKey { layer: layer.layer, expert } };
            let plan = slot_plan(layer, expert, alignment).ok_or_else(unreachable)?;
            let bytes = plan.strides.iter().try_fold(0usize, |sum, s| sum.checked_add(*s)).ok_or_else(unreachable)?;
            // A sum of aligned strides: slots that lie one behind the other stay aligned.
            slot_bytes = slot_bytes.max(bytes as u64);
        }
        // Each slice is at most its region, whose sum was just checked.
        let expert_bytes = layer.expert_bytes();
        let entry = (layer.layer, layer.experts);
        match classes.iter_mut().find(|c| c.expert_bytes == expert_bytes) {
            Some(class) => {
                class.layers.push(entry);
                class.slot_bytes = class.slot_bytes.max(Bytes(slot_bytes));
            }
            None => classes.push(SizeClass { expert_bytes, slot_bytes: Bytes(slot_bytes), layers: vec![entry] }),
        }
    }
    for class in &mut classes {
        class.layers.sort_unstable();
    }
    classes.sort_by_key(|c| std::cmp::Reverse(c.expert_bytes));
    Ok(classes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::QuantType;
    use crate::storage::layout::ExpertTensor;

    fn tensor(offset: u64, slice_bytes: u64) -> ExpertTensor {
        ExpertTensor { ty: QuantType::Q2_K, rows: 1, cols: 1, offset, slice_bytes }
    }

    fn layer(layer: u16, experts: u16, slices: [u64; 3], offset: u64) -> LayerExperts {
        let [gate, up, down] = slices.map(|s| tensor(offset, s));
        LayerExperts { layer: LayerIdx(layer), experts, gate, up, down }
    }

    const DIRECT: Alignment = Alignment { offset: 4096, memory: 512 };

    #[test]
    fn flash_q2_slots_carry_one_page_of_padding_a_part_at_most() {
        // Spec 2.4: odd experts of gate and up begin 2048 B into a page; down slices are whole pages.
        let classes = size_classes(&[layer(0, 384, [3_041_280, 3_041_280, 3_870_720], 16_384)], DIRECT).unwrap();
        assert_eq!(classes[0].expert_bytes, Bytes(9_953_280));
        assert_eq!(classes[0].slot_bytes, Bytes(743 * 4096 * 2 + 3_870_720));
    }

    #[test]
    fn layers_of_equal_experts_share_a_class() {
        let layers = [
            layer(3, 8, [100, 100, 200], 0),
            layer(1, 4, [100, 100, 200], 7),
            layer(2, 4, [1000, 1000, 1000], 0),
            layer(0, 2, [200, 100, 100], 1 << 40),
        ];
        let classes = size_classes(&layers, DIRECT).unwrap();
        let shape: Vec<_> = classes.iter().map(|c| (c.expert_bytes.0, c.experts(), c.layers[0].0.0)).collect();
        assert_eq!(shape, [(3000, 4, 2), (400, 14, 0)]);
        for class in &classes {
            assert!(class.slot_bytes.0 >= class.expert_bytes.0 && class.slot_bytes.0.is_multiple_of(4096));
        }
    }

    #[test]
    fn hostile_layouts_are_refused() {
        let one = |l| size_classes(&[l], DIRECT);
        let unreachable = |e| Err(LayoutError::Unreachable { key: ExpertKey::new(0, e) });
        assert_eq!(one(layer(0, 2, [100, 100, u64::MAX], 0)), unreachable(0));
        assert_eq!(one(layer(0, 2, [100, 100, 1 << 63], 1)), unreachable(1));
        assert_eq!(one(layer(0, 2, [100, 100, 100], u64::MAX)), unreachable(0));
        assert_eq!(one(layer(0, 0, [100, 100, 100], 0)), Err(LayoutError::Empty { layer: LayerIdx(0) }));
        assert_eq!(one(layer(0, 1, [100, 0, 100], 0)), Err(LayoutError::Empty { layer: LayerIdx(0) }));
        let twice = [layer(5, 1, [1, 1, 1], 0), layer(5, 1, [2, 2, 2], 0)];
        assert_eq!(size_classes(&twice, DIRECT), Err(LayoutError::Twice { layer: LayerIdx(5) }));
    }
}
