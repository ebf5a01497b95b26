//! Cases of the choice of compressed rows and of the router.
//! Never leaves ties out: scores are drawn from few values where the order among equals matters.

use ds4::backend::{Backend, ops};

use crate::case::{Case, Clock, Rig};
use crate::rows::{case, down, down_ids, up, up_ids, wait};

case!(Scores, "index_scores", 0.0, |c, b, clock| {
    let (first, rows, heads, width, first_pos, ratio, stride) =
        (c.n[0], c.n[1], c.n[2], c.n[3], c.n[4], c.n[5], c.n[6]);
    let [q, head_weights, keys] = [0, 1, 2].map(|i| up(b, &c.v[i]));
    let mut scores = up(b, &vec![5.0; rows * stride]);
    let op = |scores: &mut B::Buf| {
        let op = ops::IndexScores {
            q: &q,
            head_weights: &head_weights,
            keys: &keys,
            rows: first..first + rows,
            heads,
            width,
            visible: ops::Visibility { first_pos, ratio },
            scale: 0.1,
            stride,
        };
        b.index_scores(op, scores).unwrap();
    };
    op(&mut scores);
    let result = down(b, &scores);
    clock.time(|_| op(&mut scores), || wait(b, &q));
    vec![result]
});

case!(Blocks, "candidate_blocks", 0.0, |c, b, clock| {
    let (first, rows, first_pos, ratio, stride, block, blocks_max, words, has_scores) =
        (c.n[0], c.n[1], c.n[2], c.n[3], c.n[4], c.n[5], c.n[6], c.n[7], c.n[8] == 1);
    let (scores, mut mask) = (up(b, &c.v[0]), up_ids(b, &vec![-1; (first + rows) * words]));
    let op = |mask: &mut B::Ids| {
        let op = ops::CandidateBlocks {
            scores: has_scores.then_some(&scores),
            rows: first..first + rows,
            visible: ops::Visibility { first_pos, ratio },
            stride,
            block,
            blocks_max,
            words,
        };
        b.candidate_blocks(op, mask).unwrap();
    };
    op(&mut mask);
    let result = down_ids(b, &mask);
    // Bits that the ids, as F32 values, would round away.
    let mut words = vec![0i32; b.len_ids(&mask)];
    b.download_ids(&mask, 0, &mut words).unwrap();
    let low: Vec<f32> = words.iter().map(|w| (w & 0xffff) as f32).collect();
    clock.time(|_| op(&mut mask), || wait(b, &scores));
    vec![result, low]
});

case!(Select, "select_rows", 0.0, |c, b, clock| {
    let (first, rows, first_pos, ratio, stride, k, block, words) =
        (c.n[0], c.n[1], c.n[2], c.n[3], c.n[4], c.n[5], c.n[6], c.n[7]);
    let (scores, mut selected) = (up(b, &c.v[0]), up_ids(b, &vec![-7; (first + rows) * k]));
    let mask: Vec<i32> = c.v[1].iter().map(|v| v.to_bits() as i32).collect();
    let mask = up_ids(b, &mask);
    let op = |selected: &mut B::Ids| {
        let op = ops::SelectRows {
            scores: (!c.v[0].is_empty()).then_some(&scores),
            mask: (!c.v[1].is_empty()).then_some(&mask),
            rows: first..first + rows,
            visible: ops::Visibility { first_pos, ratio },
            stride,
            k,
            block,
            words,
        };
        b.select_rows(op, selected).unwrap();
    };
    op(&mut selected);
    let result = down_ids(b, &selected);
    let other = up(b, &[0.0]);
    clock.time(|_| op(&mut selected), || wait(b, &other));
    vec![result]
});

case!(Router, "route", 1e-13, |c, b, clock| {
    let (rows, experts, k) = (c.n[0], c.n[1], c.n[2]);
    let (logits, bias) = (up(b, &c.v[0]), up(b, &c.v[1]));
    let (mut ids, mut weights) = (up_ids(b, &vec![-1; rows * k]), up(b, &vec![f32::NAN; rows * k]));
    let op = |ids: &mut B::Ids, weights: &mut B::Buf| {
        let normalise = c.n[3] == 1;
        let op = ops::Route { logits: &logits, bias: &bias, rows, experts, k, scale: 2.5, normalise };
        b.route(op, ids, weights).unwrap();
    };
    op(&mut ids, &mut weights);
    let results = vec![down_ids(b, &ids), down(b, &weights)];
    clock.time(|_| op(&mut ids, &mut weights), || wait(b, &bias));
    results
});

case!(Weigh, "weigh_experts", 1e-13, |c, b, clock| {
    let (rows, experts, k) = (c.n[0], c.n[1], c.n[2]);
    let picks: Vec<i32> = c.v[1].iter().map(|v| *v as i32).collect();
    let (logits, ids) = (up(b, &c.v[0]), up_ids(b, &picks));
    let mut weights = up(b, &vec![f32::NAN; rows * k]);
    let op = |weights: &mut B::Buf| {
        let normalise = c.n[3] == 1;
        let op = ops::WeighExperts { logits: &logits, ids: &ids, rows, experts, k, scale: 1.5, normalise };
        b.weigh_experts(op, weights).unwrap();
    };
    op(&mut weights);
    let result = down(b, &weights);
    clock.time(|_| op(&mut weights), || wait(b, &logits));
    vec![result]
});

/// `count` scores of which many are equal, with both zeros.
fn tied(rig: &mut Rig, count: usize) -> Vec<f32> {
    let values = [-1.5, -0.0, 0.0, 0.25, 0.25, 3.0, f32::NEG_INFINITY];
    (0..count).map(|_| values[(rig.rng.next() % values.len() as u64) as usize]).collect()
}

fn choices(rig: &mut Rig) {
    for (first, rows, heads, width, first_pos, ratio) in [
        (0, 1, 32, 128, 8000, 2),
        (0, 1, 32, 128, 31_999, 1),
        (3, 5, 4, 64, 700, 4),
        (1, 2, 3, 20, 0, 1),
        (0, 16, 32, 128, 4000, 1),
        (0, 7, 32, 128, 300, 4),
        (0, 8, 32, 128, 1, 4),
        (5, 40, 32, 128, 2030, 4),
    ] {
        let keys: usize = (first_pos + first + rows) / ratio;
        let stride = keys.next_multiple_of(ops::SCORE_STRIDE);
        let r = &mut rig.rng;
        let v =
            vec![r.normals((first + rows) * heads * width), r.normals((first + rows) * heads), r.normals(keys * width)];
        let shape = format!("{rows} rows, {heads}x{width}, {keys} keys");
        let bytes = 4 * (keys * (width + rows) + rows * heads * width);
        rig.check(&Scores { shape, bytes, n: vec![first, rows, heads, width, first_pos, ratio, stride], v });
    }
    for (first, rows, first_pos, block, most) in
        [(0, 1, 32_767, 8, 2048), (2, 3, 700, 8, 20), (0, 2, 100, 8, 2048), (0, 4, 5000, 4, 33)]
    {
        let keys: usize = first_pos + first + rows;
        let (stride, words) = (keys.next_multiple_of(ops::SCORE_STRIDE), keys.div_ceil(block).div_ceil(32));
        let has_scores = usize::from(keys.div_ceil(block) > most);
        for ties in [false, true] {
            let v = vec![if ties { tied(rig, rows * stride) } else { rig.rng.normals(rows * stride) }];
            let shape =
                format!("{rows} rows, best {most} of {}{}", keys.div_ceil(block), if ties { ", ties" } else { "" });
            let n = vec![first, rows, first_pos, 1, stride, block, most, words, has_scores];
            rig.check(&Blocks { shape, bytes: 4 * rows * keys, n, v });
        }
    }
    for (first, rows, first_pos, k, masked) in [
        (0, 1, 32_767, 512, false),
        (0, 1, 32_767, 512, true),
        (2, 3, 700, 20, true),
        (0, 3, 30, 64, false),
        (1, 4, 1022, 512, false),
    ] {
        let keys: usize = first_pos + first + rows;
        let (stride, words) = (keys.next_multiple_of(ops::SCORE_STRIDE), keys.div_ceil(8).div_ceil(32));
        let mask: Vec<f32> = match masked {
            true => {
                (0..(first + rows) * words).map(|_| f32::from_bits((rig.rng.next() | rig.rng.next()) as u32)).collect()
            }
            false => Vec::new(),
        };
        for ties in [false, true] {
            let scores = if ties { tied(rig, rows * stride) } else { rig.rng.normals(rows * stride) };
            let shape = format!(
                "{rows} rows, best {k} of {keys}{}{}",
                if masked { ", masked" } else { "" },
                if ties { ", ties" } else { "" }
            );
            let n = vec![first, rows, first_pos, 1, stride, k, 8, words];
            rig.check(&Select { shape, bytes: 4 * rows * keys, n, v: vec![scores, mask.clone()] });
        }
    }
    rig.check(&Select {
        shape: "no scores".into(),
        bytes: 0,
        n: vec![0, 2, 5, 1, 256, 16, 8, 1],
        v: vec![Vec::new(), Vec::new()],
    });
}

pub fn cases(rig: &mut Rig) {
    choices(rig);
    for (rows, experts, k, normalise) in [(1, 384, 6, 1), (9, 384, 6, 1), (3, 5, 5, 0), (64, 128, 3, 1)] {
        let v = vec![rig.rng.normals(rows * experts), rig.rng.normals(experts).iter().map(|v| v * 0.1).collect()];
        let shape = format!("{rows} rows, {k} of {experts}");
        rig.check(&Router { shape, bytes: 4 * rows * experts, n: vec![rows, experts, k, normalise], v });
        let v = vec![tied(rig, rows * experts).iter().map(|v| v.max(-80.0)).collect(), vec![0.0; experts]];
        let shape = format!("{rows} rows, {k} of {experts}, ties");
        rig.check(&Router { shape, bytes: 4 * rows * experts, n: vec![rows, experts, k, normalise], v });
        let picks = (0..rows * k).map(|_| (rig.rng.next() % experts as u64) as f32).collect();
        let v = vec![rig.rng.normals(rows * experts).iter().map(|v| v * 9.0).collect(), picks];
        let shape = format!("{rows} rows, {k} of {experts}");
        rig.check(&Weigh { shape, bytes: 12 * rows * k, n: vec![rows, experts, k, normalise], v });
    }
}
