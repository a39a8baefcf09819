//! Engines without a model: one that works out outputs of the right lengths from the staged arrays alone, and the loop for
//! others.

use pie_planner::{
    ComputedPlan, FieldId, Layout, Limits, Outputs, Plan, Planner, SlotClass, SlotGroup, Staged,
    StagedGroup, StagedPass, StagedSlots,
};

/// Token 1 and zeros for whatever is asked; its memory is reused.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    tokens: Vec<i64>,
    dist_ids: Vec<i64>,
    floats: Vec<f32>,
}

/// The next pass, and the rest of the frame if there is none.
pub(crate) fn next_pass(
    planner: &mut Planner,
    plan: Plan,
    memory: &mut [u8],
) -> Result<StagedPass, ComputedPlan> {
    let mut block = planner.block(memory).expect("the block fits");
    match planner.stage(plan, &mut block).expect("the newest plan") {
        Staged::Pass(pass) => Ok(pass),
        Staged::Computed(computed) => Err(computed),
    }
}

/// The next slot group, and the rest of the plan if there is none.
pub(crate) fn next_group(
    planner: &Planner,
    pass: StagedPass,
    memory: &mut [u8],
) -> Result<StagedGroup, Plan> {
    let mut block = planner.block(memory).expect("the block fits");
    match pass.stage_slots(&mut block) {
        StagedSlots::Group(group) => Ok(group),
        StagedSlots::Done(plan) => Err(plan),
    }
}

/// Hands over the outputs of a group.
pub(crate) fn put(group: StagedGroup, outputs: &Outputs<'_>) -> StagedPass {
    let put = group.put_outputs(outputs).map_err(|(_, error)| error);
    put.expect("outputs of the lengths asked for")
}

/// Stages all of a plan; `compute` sees each pass, and `answer` gives the outputs of each group.
pub(crate) fn run(
    planner: &mut Planner,
    mut plan: Plan,
    memory: &mut [u8],
    mut compute: impl FnMut(&StagedPass, &[u8]),
    mut answer: impl FnMut(StagedGroup, &[u8]) -> StagedPass,
) -> ComputedPlan {
    loop {
        let mut pass = match next_pass(planner, plan, memory) {
            Ok(pass) => pass,
            Err(computed) => return computed,
        };
        compute(&pass, memory);
        plan = loop {
            match next_group(planner, pass, memory) {
                Ok(group) => pass = answer(group, memory),
                Err(plan) => break plan,
            }
        };
    }
}

impl Engine {
    /// Stages and answers all of a planned frame.
    pub(crate) fn run(
        &mut self,
        planner: &mut Planner,
        plan: Plan,
        memory: &mut [u8],
    ) -> ComputedPlan {
        self.run_seeing(planner, plan, memory, |_, _| {})
    }

    /// The same; `compute` sees each pass and the staging block.
    pub(crate) fn run_seeing(
        &mut self,
        planner: &mut Planner,
        plan: Plan,
        memory: &mut [u8],
        compute: impl FnMut(&StagedPass, &[u8]),
    ) -> ComputedPlan {
        self.run_noting(planner, plan, memory, compute, |_| {})
    }

    /// The same; `note` sees each group.
    pub(crate) fn run_noting(
        &mut self,
        planner: &mut Planner,
        plan: Plan,
        memory: &mut [u8],
        compute: impl FnMut(&StagedPass, &[u8]),
        mut note: impl FnMut(&SlotGroup),
    ) -> ComputedPlan {
        let limits = *planner.limits();
        let top_ks = planner.layout().field(FieldId::TopKs).offset;
        run(planner, plan, memory, compute, |group, memory| {
            note(group.group());
            self.answer(&limits, top_ks, group, memory)
        })
    }

    /// Answers the staged group, whose top-k counts begin at a byte of the memory.
    fn answer(
        &mut self,
        limits: &Limits,
        top_ks: usize,
        staged: StagedGroup,
        memory: &[u8],
    ) -> StagedPass {
        let group = staged.group();
        let tokens = group.count(SlotClass::Greedy)
            + group.count(SlotClass::Plain)
            + group.count(SlotClass::Filtered);
        let mut own = std::mem::take(&mut self.tokens);
        own.resize(tokens, 1);
        let pass = self.answer_with(limits, top_ks, staged, memory, &own);
        self.tokens = own;
        pass
    }

    /// Answers the staged group with these tokens.
    pub(crate) fn answer_with(
        &mut self,
        limits: &Limits,
        top_ks: usize,
        staged: StagedGroup,
        memory: &[u8],
        tokens: &[i64],
    ) -> StagedPass {
        let group = staged.group();
        let dists = group.count(SlotClass::Dist);
        let top_ks: &[i32] = bytemuck::cast_slice(&memory[top_ks..][..4 * group.len()]);
        let ids = top_ks[tokens.len()..][..dists]
            .iter()
            .map(|&k| k as usize)
            .sum();
        let logits = group.count(SlotClass::Logits) * limits.vocab_size as usize;
        let logprobs = staged.labels().len();
        let entropies = group.count(SlotClass::Entropy);
        self.dist_ids.resize(ids, 0);
        let longest = ids.max(logits).max(logprobs).max(entropies);
        self.floats.resize(longest, 0.0);
        let outputs = Outputs {
            tokens,
            dist_ids: &self.dist_ids,
            dist_probs: &self.floats[..ids],
            logits: &self.floats[..logits],
            logprobs: &self.floats[..logprobs],
            entropies: &self.floats[..entropies],
            ..Outputs::default()
        };
        put(staged, &outputs)
    }
}

/// Memory for the staging block of a planner.
pub(crate) fn memory(layout: &Layout) -> Vec<u64> {
    vec![0; layout.bytes().div_ceil(8)]
}
