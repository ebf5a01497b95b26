//! The memory plan: facts and a request in, named terms or a refusal out, before anything large is allocated.
//! Never asks the machine anything and never rounds in the user's disfavour without a note that says so.
//! Surprising fact: a budget in GB includes the prefill reserve, a budget in slots does not.

mod report;
mod slots;

use alloc::string::String;
use alloc::vec::Vec;

use crate::ids::Bytes;

pub use slots::ClassPlan;

/// What the machine has. All numbers as measured before the first large allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// RAM of the machine.
    pub total: Bytes,
    /// What the kernel says it can give without swapping.
    pub available: Bytes,
    /// Free contiguous-memory reserve, which `available` counts but ordinary allocations may not get.
    pub cma_free: Bytes,
    /// Tightest memory limit of the control groups above this process.
    pub group_limit: Option<Bytes>,
    /// What that group already uses, reclaimable file pages not counted.
    pub group_used: Bytes,
    /// Addresses that this process may still take (`ulimit -v`); `None` is unlimited.
    pub address_space: Option<Bytes>,
    /// Most bytes that may be locked; `None` is unlimited.
    pub lock_limit: Option<Bytes>,
    /// Memory to treat as used by others (`--simulate-used-memory`).
    pub simulated_used: Bytes,
}

impl Facts {
    /// What this process may still allocate.
    pub fn usable(&self) -> Bytes {
        let machine = self.available.0.saturating_sub(self.cma_free.0);
        let group = self.group_limit.map_or(u64::MAX, |l| l.0.saturating_sub(self.group_used.0));
        let addresses = self.address_space.map_or(u64::MAX, |left| left.0);
        Bytes(machine.min(group).saturating_sub(self.simulated_used.0).min(addresses))
    }

    /// Size of the world: RAM, or the group's limit or the address space when that is smaller.
    fn world(&self) -> u64 {
        [self.group_limit, self.address_space]
            .into_iter()
            .flatten()
            .fold(self.total.0, |world, limit| world.min(limit.0))
    }
}

/// Experts of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassRequest {
    /// Bytes of one expert: what it takes when all experts are resident.
    pub expert_bytes: Bytes,
    /// Bytes of one slot: the expert and its alignment padding.
    pub slot_bytes: Bytes,
    /// Layers of the class.
    pub layers: u64,
    /// Experts of all these layers.
    pub experts: u64,
}

/// The cache budget as the user gave it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Budget {
    /// As much as leaves the machine comfortable.
    #[default]
    Auto,
    /// A number of experts.
    Slots(u64),
    /// Bytes, the prefill reserve included.
    Bytes(Bytes),
}

/// What the run wants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Request {
    /// What the process occupies before the plan (already missing from `Facts::available`).
    pub process: Bytes,
    /// Weights that are read once and kept.
    pub resident: Bytes,
    /// Context length, tokens.
    pub ctx: u64,
    /// Prompt rows that share one read of each expert; zero where that is unknown.
    pub sweep: u64,
    /// Key-value state at `ctx`.
    pub kv: Bytes,
    /// Working buffers of the forward pass.
    pub scratch: Bytes,
    /// Buffers between drive and destination (row blocks, bounce buffers).
    pub staging: Bytes,
    /// Room for experts read ahead in prefill, apart from the cache.
    pub prefill_reserve: Bytes,
    /// Routed experts by size.
    pub classes: Vec<ClassRequest>,
    /// Experts that one token uses in one layer.
    pub top_k: u64,
    /// `--ssd-streaming`; off means every expert stays in memory.
    pub is_streaming: bool,
    /// Ignored when not streaming.
    pub budget: Budget,
    /// Experts to load before the first token; `None` loads none.
    pub preload: Option<u64>,
    /// How much of the plan the caller wants locked; zero for none.
    pub locked: Bytes,
}

impl Request {
    /// Experts of all layers.
    pub fn experts_total(&self) -> u64 {
        self.classes.iter().map(|c| c.experts).fold(0, u64::saturating_add)
    }

    /// Layers that route experts.
    pub fn layers_total(&self) -> u64 {
        self.classes.iter().map(|c| c.layers).fold(0, u64::saturating_add)
    }

    /// Everything but the cache. `None` when the sum leaves 64 bits.
    fn fixed(&self) -> Option<u64> {
        [self.resident, self.kv, self.scratch, self.staging, self.prefill_reserve]
            .iter()
            .try_fold(0u64, |sum, term| sum.checked_add(term.0))
    }
}

/// Memory by name. The sum of the terms is what the process will hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Process at start.
    pub process: Bytes,
    /// Weights that are read once and kept.
    pub resident: Bytes,
    /// Context length, tokens.
    pub ctx: u64,
    /// Prompt rows that share one read of each expert; zero where that is unknown.
    pub sweep: u64,
    /// Key-value state.
    pub kv: Bytes,
    /// Working buffers.
    pub scratch: Bytes,
    /// Buffers between drive and destination.
    pub staging: Bytes,
    /// Room for experts read ahead in prefill.
    pub prefill_reserve: Bytes,
    /// Slots by size class, as the request orders them.
    pub classes: Vec<ClassPlan>,
    /// Slots of all classes.
    pub cache_slots: u64,
    /// Bytes of all slots.
    pub cache: Bytes,
    /// Experts of all layers.
    pub experts_total: u64,
    /// Experts that one token uses in all layers.
    pub token_experts: u64,
    /// Experts to load before the first token, within the slots.
    pub preload: u64,
    /// Most distinct experts that one lease may hold: the smallest class, at most.
    pub lease_max: u64,
    /// Usable memory that stays free.
    pub spare: Bytes,
    /// Whether experts are streamed.
    pub is_streaming: bool,
    /// What was asked.
    pub budget: Budget,
    /// What was found.
    pub facts: Facts,
    /// What differs from what was asked, or deserves care; one sentence each.
    pub notes: Vec<String>,
}

impl Plan {
    /// Memory that an automatic budget leaves free, and what any budget does.
    pub fn headroom(&self) -> (Bytes, Bytes) {
        let Headroom { comfortable, least } = Headroom::of(&self.facts);
        (Bytes(comfortable), Bytes(least))
    }

    /// Everything the process will hold.
    pub fn total(&self) -> Bytes {
        let terms =
            [self.process, self.resident, self.kv, self.scratch, self.staging, self.prefill_reserve, self.cache];
        Bytes(terms.iter().fold(0, |sum, t| sum.saturating_add(t.0)))
    }
}

/// Why no plan exists. The message ends with what to do.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlanError {
    /// A description that no file can mean.
    #[error("the model's sizes make no sense ({what}); the file is damaged or of an unknown kind")]
    BadModel {
        /// Which number.
        what: &'static str,
    },
    /// The key-value state alone is too large.
    #[error(
        "--ctx {ctx} needs {kv} of key-value state and scratch, but {room} is left after {resident} of weights{}; \
         {}", cache_clause(.cache), ctx_advice(*.ctx_fits)
    )]
    CtxTooLarge {
        /// Asked.
        ctx: u64,
        /// Its bytes.
        kv: Bytes,
        /// Weights that come first.
        resident: Bytes,
        /// Smallest cache; zero when not streaming.
        cache: Bytes,
        /// What is left for the context.
        room: Bytes,
        /// About the longest context that fits.
        ctx_fits: u64,
    },
    /// Weights that must stay in memory do not fit.
    #[error(
        "{needed} must stay in memory (weights {resident}, smallest expert cache {cache}), but {usable} is usable; \
         free memory or use a smaller quantisation"
    )]
    ResidentTooLarge {
        /// Sum of both terms.
        needed: Bytes,
        /// Weights read once and kept.
        resident: Bytes,
        /// One token's experts.
        cache: Bytes,
        /// What may be allocated.
        usable: Bytes,
    },
    /// Without streaming all experts must fit.
    #[error(
        "keeping all {experts} experts in memory takes {needed} in all, but {usable} is usable; \
         add --ssd-streaming to read experts from the drive"
    )]
    ResidentModeTooLarge {
        /// Experts of all layers.
        experts: u64,
        /// The whole plan.
        needed: Bytes,
        /// What may be allocated.
        usable: Bytes,
    },
    /// The budget cannot hold one token's experts.
    #[error(
        "--ssd-streaming-cache-experts {asked} holds {slots} experts, but one token routes {floor} ({layers} layers x \
         {top_k}). Use at least {least}, or drop the flag for the automatic budget ({auto} here)."
    )]
    BudgetBelowToken {
        /// As the user wrote it.
        asked: String,
        /// Slots it buys.
        slots: u64,
        /// One token's experts.
        floor: u64,
        /// Layers that route.
        layers: u64,
        /// Experts a layer.
        top_k: u64,
        /// Smallest budget that works, as the user would write it.
        least: String,
        /// Automatic budget, reserve included.
        auto: Bytes,
    },
    /// The budget exceeds the memory.
    #[error(
        "--ssd-streaming-cache-experts {asked} wants {wanted}, but {room} is left for experts here \
         ({usable} usable less {fixed} for the rest and {headroom} for the system). \
         Use at most {most}, or drop the flag for the automatic budget ({auto} here)."
    )]
    BudgetAboveMemory {
        /// As the user wrote it.
        asked: String,
        /// Its bytes.
        wanted: Bytes,
        /// What is left for experts, reserve included.
        room: Bytes,
        /// What may be allocated.
        usable: Bytes,
        /// Terms beside experts.
        fixed: Bytes,
        /// What the system keeps in any case.
        headroom: Bytes,
        /// Largest budget that works, as the user would write it.
        most: String,
        /// Automatic budget, reserve included.
        auto: Bytes,
    },
}

fn cache_clause(cache: &Bytes) -> String {
    if cache.0 == 0 { String::new() } else { alloc::format!(" and {cache} for one token's experts") }
}

fn ctx_advice(ctx_fits: u64) -> String {
    if ctx_fits == 0 {
        String::from("use a smaller --prefill-chunk, or free memory first")
    } else {
        alloc::format!("use --ctx {ctx_fits} or less, or free memory")
    }
}

/// Memory that is left alone: by an automatic budget, and by any budget.
struct Headroom {
    comfortable: u64,
    least: u64,
}

impl Headroom {
    /// One eighth of RAM is what the anchor's plan leaves (spec 7.1); a 32nd keeps the kernel's own reserves and a
    /// shell alive when the user insists.
    fn of(facts: &Facts) -> Self {
        let world = facts.world();
        Self { comfortable: world / 8, least: world / 32 }
    }
}

/// Divides memory among the classes of weights and state.
///
/// # Errors
/// A refusal that says what was asked, what there is and what would work.
pub fn plan(facts: &Facts, request: &Request) -> Result<Plan, PlanError> {
    check_model(request)?;
    let usable = facts.usable().0;
    let headroom = Headroom::of(facts);
    let fixed = request.fixed().ok_or(PlanError::BadModel { what: "the sum of all sizes leaves 64 bits" })?;
    let floor = slots::floor(request);
    let all = slots::all(request);
    let room_least = usable.saturating_sub(headroom.least);
    if !request.is_streaming {
        return plan_resident(facts, request, fixed, &all, room_least);
    }
    let floor_bytes = slots::bytes(&floor);
    check_fixed(request, fixed, floor_bytes, room_least)?;
    // What experts (and their reserve) get when nothing is asked: never below the floor, which was just seen to fit.
    let reserve = request.prefill_reserve.0;
    let auto_room = usable.saturating_sub(headroom.comfortable).saturating_sub(fixed).max(floor_bytes);
    let auto = slots::fill(request, auto_room);
    let mut notes = Vec::new();
    let classes = match request.budget {
        Budget::Auto => auto.clone(),
        Budget::Slots(_) | Budget::Bytes(_) => {
            let ask = slots::Ask { room: room_least - fixed, auto: Bytes(slots::bytes(&auto) + reserve) };
            slots::asked(facts, request, fixed, headroom.least, &ask, &mut notes)?
        }
    };
    Ok(finish(facts, request, fixed, classes, &headroom, notes))
}

fn check_model(request: &Request) -> Result<(), PlanError> {
    let bad = |what| Err(PlanError::BadModel { what });
    for class in &request.classes {
        if class.expert_bytes.0 == 0 || class.slot_bytes < class.expert_bytes || class.layers == 0 || class.experts == 0
        {
            return bad("an expert class is empty");
        }
        // Keeps every product below well inside 64 bits: 2^40 bytes x 2^20 experts x 2^3 classes.
        if class.slot_bytes.0 > 1 << 40 || class.experts > 1 << 20 || class.layers > class.experts {
            return bad("an expert class is out of bounds");
        }
        if request.top_k == 0 || request.top_k > class.experts / class.layers {
            return bad("a token uses no experts, or more than a layer has");
        }
    }
    if request.classes.len() > 8 {
        return bad("more than 8 expert sizes");
    }
    Ok(())
}

/// Blames the term that is too large: the context if the weights alone would fit.
fn check_fixed(request: &Request, fixed: u64, floor_bytes: u64, room: u64) -> Result<(), PlanError> {
    if fixed.saturating_add(floor_bytes) <= room {
        return Ok(());
    }
    let state = request.kv.0 + request.scratch.0;
    let needed = (fixed - state).saturating_add(floor_bytes);
    if needed > room {
        return Err(PlanError::ResidentTooLarge {
            needed: Bytes(needed),
            resident: request.resident,
            cache: Bytes(floor_bytes),
            usable: Bytes(room),
        });
    }
    Err(ctx_too_large(request, floor_bytes, room - needed))
}

fn ctx_too_large(request: &Request, cache: u64, room: u64) -> PlanError {
    let for_kv = room.saturating_sub(request.scratch.0);
    // Key-value state grows in proportion to the context, up to a small constant part.
    let fits = u128::from(request.ctx) * u128::from(for_kv) / u128::from(request.kv.0.max(1));
    let ctx_fits = u64::try_from(fits).unwrap_or(u64::MAX) / 256 * 256;
    PlanError::CtxTooLarge {
        ctx: request.ctx,
        kv: Bytes(request.kv.0 + request.scratch.0),
        resident: request.resident,
        cache: Bytes(cache),
        room: Bytes(room),
        ctx_fits,
    }
}

/// Every expert has its own slot.
fn plan_resident(
    facts: &Facts,
    request: &Request,
    fixed: u64,
    all: &[ClassPlan],
    room: u64,
) -> Result<Plan, PlanError> {
    let cache = slots::bytes(all);
    let needed = fixed.saturating_add(cache);
    if needed > room {
        let state = request.kv.0 + request.scratch.0;
        let without_state = needed - state;
        if without_state <= room && state > room / 2 {
            return Err(ctx_too_large(request, 0, room - without_state));
        }
        return Err(PlanError::ResidentModeTooLarge {
            experts: request.experts_total(),
            needed: Bytes(needed),
            usable: Bytes(room),
        });
    }
    Ok(finish(facts, request, fixed, all.to_vec(), &Headroom::of(facts), Vec::new()))
}

fn finish(
    facts: &Facts,
    request: &Request,
    fixed: u64,
    classes: Vec<ClassPlan>,
    headroom: &Headroom,
    mut notes: Vec<String>,
) -> Plan {
    let cache = slots::bytes(&classes);
    let cache_slots = classes.iter().map(|c| c.slots).sum();
    let token_experts = request.layers_total() * request.top_k;
    let spare = facts.usable().0.saturating_sub(fixed).saturating_sub(cache);
    let preload = request.preload.unwrap_or(0).min(cache_slots);
    report::add_notes(request, cache_slots, token_experts, &mut notes);
    if spare < headroom.comfortable {
        notes.push(alloc::format!(
            "only {} of memory stays free (the automatic budget leaves {}); other programs may be slowed",
            Bytes(spare),
            Bytes(headroom.comfortable)
        ));
    }
    report::lock_note(facts, request, &mut notes);
    Plan {
        process: request.process,
        resident: request.resident,
        ctx: request.ctx,
        sweep: request.sweep,
        kv: request.kv,
        scratch: request.scratch,
        staging: request.staging,
        prefill_reserve: request.prefill_reserve,
        cache_slots,
        cache: Bytes(cache),
        experts_total: request.experts_total(),
        token_experts,
        preload,
        lease_max: classes.iter().map(|c| c.slots).min().unwrap_or(0),
        spare: Bytes(spare),
        is_streaming: request.is_streaming,
        budget: request.budget,
        facts: *facts,
        notes,
        classes,
    }
}
