//! One frame of `ds4-cache top` as lines: numbers above, two maps below. Owns glyphs and colours; never reads a file.
//! Surprising fact: a map cell stands for several experts, and a row for several layers, where the terminal is too small;
//! a cell is then an average, so that a hot expert among cold ones looks lukewarm.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};

use super::table::{grouped, percent};
use crate::obs::snapshot::{LayerSnapshot, Snapshot};
use crate::units::Bytes;

/// From never used to used most; the first glyph is for zero alone.
const USE: &[u8] = b" .:-=+*#%@";
/// From no expert of the cell cached to all.
const PRESENCE: &[u8] = b".-+#";
const COLD: Color = Color::DarkGray;
const CACHED: Color = Color::Green;
/// Columns beside the two maps: layer numbers, gaps, counts.
const BESIDE: u16 = 26;
const MAP_WIDTH_MIN: u16 = 8;

/// The lines of a frame of at most `height` lines, about `width` columns.
pub fn frame(s: &Snapshot, width: u16, height: u16) -> Vec<Line<'static>> {
    let mut lines = numbers(s, width);
    if s.layers.is_empty() {
        lines.push(Line::from("nothing is streamed: every expert is in memory"));
        return lines;
    }
    let experts = usize::from(s.layers.iter().map(|l| l.experts).max().unwrap_or(1)).max(1);
    let columns = usize::from((width.saturating_sub(BESIDE) / 2).max(MAP_WIDTH_MIN)).min(experts);
    let per_cell = experts.div_ceil(columns);
    let columns = experts.div_ceil(per_cell);
    let rows = usize::from(height).saturating_sub(lines.len() + 2).max(1);
    let per_row = s.layers.len().div_ceil(rows);
    let cell = if per_cell == 1 { "a cell is one expert".into() } else { format!("a cell is {per_cell} experts") };
    lines.push(Line::default());
    lines.push(Line::from(format!("{:>9}  {:<columns$}  {:<columns$}  cached  ({cell})", "layer", "use", "in memory")));
    lines.extend(s.layers.chunks(per_row).map(|layers| map_row(layers, columns, per_cell)));
    lines
}

/// The text of lines, each with its newline and without trailing spaces.
pub fn plain(lines: &[Line<'_>]) -> String {
    let text = |line: &Line<'_>| line.spans.iter().map(|span| span.content.as_ref()).collect::<String>();
    lines.iter().map(|line| format!("{}\n", text(line).trim_end())).collect()
}

fn numbers(s: &Snapshot, width: u16) -> Vec<Line<'static>> {
    let rate = |rate: Option<f64>| rate.map_or("-".into(), percent);
    vec![
        Line::from(format!("{} ({}), process {}, {:.1} s", s.model, s.arch, s.pid, s.elapsed_ms as f64 / 1e3)),
        Line::from(format!(
            "tokens  {} computed, {} one at a time, {:.1} t/s now",
            grouped(s.tokens),
            grouped(s.decode_tokens),
            s.decode_tps
        )),
        slots(s, width),
        Line::from(format!(
            "hits    {} in all, {} in decode; {} misses, {} evictions",
            rate(s.hit_rate),
            rate(s.decode_hit_rate),
            grouped(s.misses),
            grouped(s.evictions)
        )),
        Line::from(format!(
            "drive   {} reads in flight, {:.2} GB/s now, {} in all; steps waited {:.0} ms",
            s.reads_in_flight,
            s.read_gb_per_s,
            Bytes(s.read_bytes),
            s.wait_ms
        )),
    ]
}

/// A bar of the states and their counts.
fn slots(s: &Snapshot, width: u16) -> Line<'static> {
    let states = [
        (s.slots.leased, '#', Color::Yellow, "leased"),
        (s.slots.valid, '=', CACHED, "valid"),
        (s.slots.filling, '>', Color::Cyan, "filling"),
        (s.slots.empty, '.', COLD, "empty"),
    ];
    let bar = u64::from(width / 3).clamp(8, 40);
    let total = s.slots.total.max(1);
    let mut spans = vec![Span::raw("slots   [")];
    let (mut seen, mut drawn) = (0, 0);
    for (count, glyph, color, _) in states {
        seen += count;
        // Rounded at the running sum, so that the bar is exactly as long as it should be.
        let end = (bar * seen.min(total) + total / 2) / total;
        spans.push(Span::styled(glyph.to_string().repeat((end - drawn) as usize), Style::new().fg(color)));
        drawn = end;
    }
    spans.push(Span::raw(" ".repeat((bar - drawn) as usize)));
    let counts: Vec<String> =
        states.iter().map(|(n, glyph, _, name)| format!("{glyph} {} {name}", grouped(*n))).collect();
    spans.push(Span::raw(format!("] {}: {}", grouped(s.slots.total), counts.join("  "))));
    Line::from(spans)
}

fn map_row(layers: &[LayerSnapshot], columns: usize, per_cell: usize) -> Line<'static> {
    let name = match layers {
        [one] => one.layer.to_string(),
        [first, .., last] => format!("{}-{}", first.layer, last.layer),
        [] => String::new(),
    };
    let cells: Vec<(f64, f64)> = (0..columns).map(|at| cell(layers, at * per_cell, per_cell)).collect();
    let most = cells.iter().map(|c| c.0).fold(0.0, f64::max);
    let mut spans = vec![Span::raw(format!("{name:>9}  "))];
    for &(uses, cached) in &cells {
        let color = if cached >= 0.5 { CACHED } else { COLD };
        spans.push(Span::styled(glyph(USE, uses, most).to_string(), Style::new().fg(color)));
    }
    spans.push(Span::raw("  "));
    for &(_, cached) in &cells {
        let color = if cached > 0.0 { CACHED } else { COLD };
        spans.push(Span::styled(glyph(PRESENCE, cached, 1.0).to_string(), Style::new().fg(color)));
    }
    let (cached, experts): (usize, usize) =
        layers.iter().fold((0, 0), |sum, l| (sum.0 + l.cached.len(), sum.1 + usize::from(l.experts)));
    spans.push(Span::raw(format!("  {cached}/{experts}")));
    Line::from(spans)
}

/// Mean uses and cached share of experts `first..first + count` of all `layers`.
fn cell(layers: &[LayerSnapshot], first: usize, count: usize) -> (f64, f64) {
    let (mut uses, mut cached, mut experts) = (0u64, 0usize, 0usize);
    for layer in layers {
        let end = (first + count).min(layer.uses.len());
        let Some(part) = layer.uses.get(first..end) else { continue };
        experts += part.len();
        uses += part.iter().map(|&n| u64::from(n)).sum::<u64>();
        cached += layer.cached.iter().filter(|&&e| (first..end).contains(&usize::from(e))).count();
    }
    let experts = experts.max(1) as f64;
    (uses as f64 / experts, cached as f64 / experts)
}

/// The glyph of `value` on a ramp up to `most`: the first for nothing at all, the last for the most.
fn glyph(ramp: &[u8], value: f64, most: f64) -> char {
    if value <= 0.0 || most <= 0.0 {
        return char::from(ramp[0]);
    }
    let steps = ramp.len() - 1;
    let step = (value / most * steps as f64).ceil() as usize;
    char::from(ramp[step.clamp(1, steps)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::obs::snapshot::SlotStates;

    fn snapshot() -> Snapshot {
        let layer = |layer: u16, uses: &[u32], cached: &[u16]| LayerSnapshot {
            layer,
            experts: uses.len() as u16,
            cached: cached.into(),
            uses: uses.into(),
        };
        Snapshot {
            model: "m.gguf".into(),
            arch: "deepseek41".into(),
            pid: 7,
            slots: SlotStates { total: 8, empty: 2, filling: 1, valid: 3, leased: 2 },
            hit_rate: Some(0.5),
            layers: vec![layer(0, &[0, 9, 1, 5], &[1, 3]), layer(1, &[4, 4, 0, 0], &[0])],
            ..Snapshot::default()
        }
    }

    #[test]
    fn maps_show_use_and_presence() {
        let text = plain(&frame(&snapshot(), 100, u16::MAX));
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[7], "        0   @.+  .#.#  2/4", "{text}");
        assert_eq!(rows[8], "        1  @@    #...  1/4", "{text}");
        assert!(rows[2].contains("8: # 2 leased  = 3 valid  > 1 filling  . 2 empty"), "{text}");
        assert!(rows[3].contains("50.0 % in all, - in decode"), "{text}");
    }

    #[test]
    fn a_small_terminal_gets_averages() {
        let mut s = snapshot();
        s.layers = (0..40)
            .map(|layer| LayerSnapshot { layer, experts: 400, cached: (0..100).collect(), uses: vec![1; 400] })
            .collect();
        let lines = frame(&s, 66, 20);
        assert!(lines.len() <= 20, "{}", lines.len());
        let text = plain(&lines);
        assert!(
            text.contains("a cell is 20 experts") && text.contains("0-3  @@@@@@@@@@@@@@@@@@@@  #####...."),
            "{text}"
        );
        assert!(text.lines().all(|l| l.len() <= 100), "{text}");
    }

    #[test]
    fn the_bar_is_as_long_as_it_should_be() {
        for (total, empty, filling, valid, leased) in
            [(0, 0, 0, 0, 0), (7, 1, 2, 3, 1), (3, 0, 0, 0, 3), (1000, 999, 1, 0, 0)]
        {
            let s = Snapshot { slots: SlotStates { total, empty, filling, valid, leased }, ..Snapshot::default() };
            let text = plain(&[slots(&s, 99)]);
            assert_eq!(text.find(']'), Some(9 + 33), "{text}");
        }
        let none = plain(&frame(&Snapshot::default(), 80, 24));
        assert!(none.contains("nothing is streamed"), "{none}");
    }
}
