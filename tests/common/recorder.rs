//! A probe that keeps all that it is shown.
//! Never asks for less than everything. Surprising fact: rows arrive chunk by chunk and are joined by position.

use std::collections::HashMap;

use ds4::models::probe::{Point, Probe};

/// Everything by (point, layer): rows in order of position.
#[derive(Default)]
pub struct Recorder {
    pub values: HashMap<(Point, usize), (usize, Vec<f32>)>,
    pub ids: HashMap<(Point, usize), (usize, Vec<i32>)>,
}

impl Recorder {
    /// Row `pos` of a point.
    pub fn row(&self, point: Point, layer: usize, pos: usize) -> &[f32] {
        let (width, values) = &self.values[&(point, layer)];
        &values[pos * width..][..*width]
    }

    /// Ids of row `pos` of a point.
    pub fn id_row(&self, point: Point, layer: usize, pos: usize) -> &[i32] {
        let (width, ids) = &self.ids[&(point, layer)];
        &ids[pos * width..][..*width]
    }
}

impl Probe for Recorder {
    fn wants(&self, _point: Point) -> bool {
        true
    }

    fn values(&mut self, point: Point, layer: usize, first_pos: usize, width: usize, values: &[f32]) {
        let (_, all) = self.values.entry((point, layer)).or_insert((width, Vec::new()));
        if !matches!(point, Point::HeadIn | Point::IndexKeyIn) {
            assert_eq!(all.len(), first_pos * width, "{point:?} of layer {layer} arrives in order");
        }
        all.extend_from_slice(values);
    }

    fn ids(&mut self, point: Point, layer: usize, first_pos: usize, width: usize, ids: &[i32]) {
        let (_, all) = self.ids.entry((point, layer)).or_insert((width, Vec::new()));
        assert_eq!(all.len(), first_pos * width, "{point:?} of layer {layer} arrives in order");
        all.extend_from_slice(ids);
    }
}
