//! The plan as lines for a person. Owns the wording of notes and of the table.
//! Never prints a number that is not in the plan.
//! Surprising fact: the lines carry no program prefix; the front end adds it.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::slots::gigabytes;
use super::{Budget, Facts, Plan, Request};
use crate::ids::Bytes;

pub(super) fn add_notes(request: &Request, slots: u64, token_experts: u64, notes: &mut Vec<String>) {
    if request.is_streaming && slots < 2 * token_experts && slots < request.experts_total() {
        notes.push(alloc::format!(
            "{slots} slots hold less than two tokens' experts (2 x {token_experts}); most experts will be read again for \
             every token"
        ));
    }
    if let Some(asked) = request.preload.filter(|&asked| asked > slots) {
        notes.push(alloc::format!("{asked} experts were to be preloaded; {slots} fit"));
    }
}

pub(super) fn lock_note(facts: &Facts, request: &Request, notes: &mut Vec<String>) {
    if let Some(limit) = facts.lock_limit.filter(|limit| *limit < request.locked) {
        notes.push(alloc::format!(
            "{} should be locked, but the memlock limit is {limit}; raise it with ulimit -l",
            request.locked
        ));
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let facts = &self.facts;
        write!(f, "memory: {} usable of {} ({} available", facts.usable(), facts.total, facts.available)?;
        if facts.cma_free.0 > 0 {
            write!(f, ", {} of it reserved for contiguous use", facts.cma_free)?;
        }
        if let Some(limit) = facts.group_limit {
            write!(f, ", control group {} of {limit}", facts.group_used)?;
        }
        if let Some(left) = facts.address_space {
            write!(f, ", address space for {left} more")?;
        }
        if facts.simulated_used.0 > 0 {
            write!(f, ", {} taken as used", facts.simulated_used)?;
        }
        writeln!(f, ")")?;
        let terms = [
            ("process at start", self.process),
            ("resident weights", self.resident),
            ("key-value state", self.kv),
            ("scratch", self.scratch),
            ("staging", self.staging),
            ("prefill reserve", self.prefill_reserve),
        ];
        for (name, bytes) in terms.iter().filter(|(_, bytes)| bytes.0 > 0) {
            write!(f, "  {name:<17}{:>12}", PadBytes(*bytes))?;
            if *name == "key-value state" {
                write!(f, "  --ctx {}", self.ctx)?;
            }
            if *name == "scratch" && self.sweep > 0 {
                write!(f, "  --sweep-rows {}", self.sweep)?;
            }
            writeln!(f)?;
        }
        write!(f, "  {:<17}{:>12}", "expert cache", PadBytes(self.cache))?;
        self.fmt_cache(f)?;
        write!(f, "  {:<17}{:>12}", "planned", PadBytes(self.total()))?;
        write!(f, "  leaves {} to the system", self.spare)?;
        for note in &self.notes {
            write!(f, "\nnote: {note}")?;
        }
        Ok(())
    }
}

impl Plan {
    fn fmt_cache(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.experts_total == 0 {
            return writeln!(f, "  the model routes no experts");
        }
        write!(f, "  {} slots for {} experts ", self.cache_slots, self.experts_total)?;
        write!(f, "({:.1} %), one token uses {}; ", percent(self.cache_slots, self.experts_total), self.token_experts)?;
        match (self.is_streaming, self.budget) {
            (false, _) => writeln!(f, "all resident (no --ssd-streaming)"),
            (true, Budget::Auto) => writeln!(f, "automatic budget"),
            (true, Budget::Slots(slots)) => writeln!(f, "asked {slots} slots"),
            (true, Budget::Bytes(bytes)) => writeln!(f, "asked {}", gigabytes(bytes.0)),
        }
    }
}

/// `Bytes` that honours a width.
struct PadBytes(Bytes);

impl fmt::Display for PadBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&alloc::format!("{}", self.0))
    }
}
