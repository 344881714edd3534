//! The cost of giving a request to a worker, in seconds: those that the request itself takes there, and those that it takes
//! from others. docs/concepts.md explains it with a picture.
//!
//! There is no weight to set. What decides is how long the worker takes for a prompt token, a step and the contexts of its
//! answers (learnt, `fleet/speed`), and how long answers of the model usually are (learnt). A factor of 3 in any of them costs 1
//! to 5 %.

use std::num::NonZeroU64;

use serde::Serialize;

use super::types::{Backlog, Cached, Expected, Request, State, View};
use super::{Settings, TierCredit};

/// Seconds for loading a LoRA adapter into a GPU. An adapter of rank 16 of an 8B model (80 MB) takes about 80 ms from a disk and
/// a few from memory; but another adapter, whose requests may follow, leaves the GPU for it.
const ADAPTER_SECONDS: f64 = 0.03;

/// How many requests the tokens of a prompt delay for each one that is there: that one, and one of those that come before the
/// worker has nothing to do any more. In simulation, beside 1 and nothing for those that usually wait: over 40 loads whole answers
/// take 0.8 % less and first tokens about 1 % less; where only prompts are computed, first tokens come a tenth sooner near the limit
/// of what engines can do, and 40 % beyond it. 1.5 and 2.5 are about as good.
const DELAYED_FOR_EACH: f64 = 2.0;

/// What each request of the last seconds that had the same longest cached prefix takes off the part that a request pays of the
/// delay of a copy ([`Costs::copy_part`]). 0.2 and 1 are about as good.
const COPY_SHARED: f64 = 0.5;

/// So many may be turns of one conversation, each of which adds less than a block.
const TURNS: f64 = 3.0;

/// A copy that many wait for still delays those that are there.
const COPY_PART_MIN: f64 = 0.1;

/// How many requests that come later they delay for each prompt that usually waits at a worker. 2 and 4 are about as good.
const LATER_FOR_EACH: f64 = 3.0;

/// The terms that add up to a cost, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Terms {
    /// Until the prompts that the worker has accepted are computed.
    pub wait: f64,
    /// To compute the tokens of this prompt that the worker does not have, or to receive them.
    pub compute: f64,
    /// What computing them takes from others: from each request that is there and one that comes behind it, and from those that
    /// come later.
    pub delay: f64,
    /// The answer slows those that are there, and is slowed by them.
    pub answer: f64,
    /// Until the engine has a free slot for the answer.
    pub slot: f64,
    /// To load the request's LoRA adapter; 0 at a worker that has it in its GPU.
    pub adapter: f64,
}

impl Terms {
    #[inline]
    pub fn sum(&self) -> f64 {
        self.wait + self.compute + self.delay + self.answer + self.slot + self.adapter
    }

    /// Each term in another unit.
    pub fn map(&self, of: impl Fn(f64) -> f64) -> Self {
        Self {
            wait: of(self.wait),
            compute: of(self.compute),
            delay: of(self.delay),
            answer: of(self.answer),
            slot: of(self.slot),
            adapter: of(self.adapter),
        }
    }

    /// What the request waits for its first token, but for the step that makes it.
    #[inline]
    fn before_first_token(&self) -> f64 {
        self.wait + self.compute + self.slot + self.adapter
    }
}

impl Cached {
    /// How many tokens in GPU memory the cached prefix is worth.
    #[inline]
    pub fn credit(&self, credit: &TierCredit) -> u32 {
        if self.cpu | self.disk == 0 {
            return self.gpu;
        }
        let lower = f64::from(self.cpu) * credit.cpu + f64::from(self.disk) * credit.disk;
        self.gpu + lower as u32
    }
}

/// What the costs of one decision have in common.
#[derive(Clone, Copy, Debug)]
pub struct Costs<'a> {
    pub(super) settings: &'a Settings,
    pub(super) request: &'a Request,
    /// Seconds for a prompt token at the mean rate of the model's workers: where a request that comes later will be is not known.
    pub(super) mean_prompt_token: f64,
    /// What a prompt token takes from requests that are not there yet: from one in any case, and from more where prompts usually wait.
    later: f64,
    /// The longest prefix that a worker has.
    pub(super) shared: Option<NonZeroU64>,
    /// Tokens of the prompt that the worker with that prefix computes.
    least_new: u32,
    /// The part that the request pays of the delay of computing the longest cached prefix again at a worker that lacks it. The
    /// requests that share the prefix, and come after this one, find two copies of it.
    copy_part: f64,
}

impl<'a> Costs<'a> {
    pub fn new(settings: &'a Settings, request: &'a Request, view: &impl View) -> Self {
        let mean_prompt_token = view.mean_prompt_token();
        let shared = view.shared_prefix();
        Self {
            settings,
            request,
            mean_prompt_token,
            later: mean_prompt_token * (1.0 + LATER_FOR_EACH * view.waiting_prompts()),
            shared: shared.key,
            least_new: request.prompt_tokens.saturating_sub(shared.tokens),
            copy_part: copy_part(shared.requests),
        }
    }

    /// Tokens of the prompt that a worker would have to compute.
    #[inline]
    pub fn new_tokens(&self, cached: &Cached) -> u32 {
        let saved = cached.credit(&self.settings.advanced.tier_credit);
        self.request.prompt_tokens.saturating_sub(saved)
    }

    /// Tokens of the prompt that a worker has cached in no tier.
    #[inline]
    pub(super) fn uncached_tokens(&self, cached: &Cached) -> u32 {
        self.request.prompt_tokens.saturating_sub(cached.tokens())
    }

    #[inline]
    pub fn cost(&self, state: &State, new_tokens: u32) -> f64 {
        self.terms(state, new_tokens).sum()
    }

    /// For a request whose prompt the worker computes, but for what it has cached.
    #[inline]
    pub fn terms(&self, state: &State, new_tokens: u32) -> Terms {
        let prompt_token = state.speed.prompt_token;
        Terms {
            compute: f64::from(new_tokens) * prompt_token,
            delay: self.delay(new_tokens, delayed(state), prompt_token),
            ..self.terms_of_answer(state)
        }
    }

    /// What computing so many tokens takes from others, `delayed` of which stand still meanwhile.
    #[inline]
    fn delay(&self, new_tokens: u32, delayed: f64, prompt_token: f64) -> f64 {
        let new = f64::from(new_tokens);
        let copied = f64::from(new_tokens.saturating_sub(self.least_new));
        let paid = new - (1.0 - self.copy_part) * copied;
        new * self.later + paid * DELAYED_FOR_EACH * delayed * prompt_token
    }

    /// For a request of whose prompt the worker receives the tokens that it has not cached, which another one computes:
    /// receiving takes a part of the time that computing takes, however fast the worker computes, and no time from others.
    /// Returns with the terms how many tokens are computed in that time.
    #[inline]
    pub(super) fn terms_receiving(&self, state: &State, cached: &Cached) -> (u32, Terms) {
        let lacks = self.uncached_tokens(cached);
        let received = Cached {
            cpu: cached.cpu + lacks,
            ..*cached
        };
        let received_as = self.new_tokens(&received);
        let terms = Terms {
            compute: f64::from(received_as) * self.mean_prompt_token,
            ..self.terms_of_answer(state)
        };
        (received_as, terms)
    }

    #[inline]
    fn terms_of_answer(&self, state: &State) -> Terms {
        let (speed, tokens) = (&state.speed, self.request.answer_tokens);
        let (n, context) = (f64::from(state.requests), state.context_tokens as f64);
        let prompt = f64::from(self.request.prompt_tokens);
        Terms {
            wait: state.queued_tokens as f64 * speed.prompt_token,
            answer: tokens * (2.0 * speed.answer() * n + speed.context() * (n * prompt + context)),
            slot: over_slots(state) * tokens * speed.step_time(n, context),
            adapter: if state.lacks_adapter {
                ADAPTER_SECONDS
            } else {
                0.0
            },
            ..Terms::default()
        }
    }

    /// When tokens are expected of a worker for which these are the terms.
    pub fn expected(&self, state: &State, terms: &Terms) -> Expected {
        let slots = f64::from(state.slots.max(1));
        let n = f64::from(state.requests).min(slots - 1.0) + 1.0;
        let context = state.context_tokens as f64 + f64::from(self.request.prompt_tokens);
        let step = state.speed.step_time(n, context);
        Expected {
            first_token: terms.before_first_token() + step,
            token: step,
        }
    }

    /// A lower bound of the cost at a worker, for `new_tokens` or more.
    #[inline]
    pub(super) fn at_least(&self, backlog: &Backlog, new_tokens: u32) -> f64 {
        let Backlog {
            queued_tokens,
            prompt_token,
            delayed,
        } = *backlog;
        let computed = (queued_tokens as f64 + f64::from(new_tokens)) * prompt_token;
        computed + self.delay(new_tokens, delayed, prompt_token)
    }
}

/// See [`Costs::copy_part`]. `requests`: that shared the prefix lately.
#[inline]
fn copy_part(requests: f64) -> f64 {
    let others = (requests - TURNS).max(0.0);
    (1.0 / (1.0 + COPY_SHARED * others)).max(COPY_PART_MIN)
}

/// How many of the requests that are there stand still while a prompt is computed.
#[inline]
fn delayed(state: &State) -> f64 {
    state.delayed * (1.0 - state.speed.overlap)
}

/// How many times all slots must become free before this request has one.
#[inline]
fn over_slots(state: &State) -> f64 {
    let beyond = state.requests.saturating_add(1).saturating_sub(state.slots);
    match beyond.max(state.waiting) {
        0 => 0.0,
        over => f64::from(over) / f64::from(state.slots.max(1)),
    }
}

/// Seconds for a step at a worker as it is: for texts and pages.
pub fn step_seconds(state: &State) -> f64 {
    let context = state.context_tokens as f64;
    state.speed.step_time(f64::from(state.requests), context)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::speed::Speed;
    use crate::routing::policy::tests::Table;
    use crate::routing::types;

    fn request(prompt_tokens: u32, answer_tokens: f64) -> Request {
        Request {
            prompt_tokens,
            answer_tokens,
            ..Request::default()
        }
    }

    fn state(requests: u32, queued_tokens: u64, context_tokens: u64) -> State {
        State {
            requests,
            delayed: f64::from(requests),
            queued_tokens,
            context_tokens,
            ..State::default()
        }
    }

    fn terms(request: &Request, state: &State, new_tokens: u32) -> Terms {
        let (settings, table) = (Settings::default(), Table::new(&[]));
        Costs::new(&settings, request, &table).terms(state, new_tokens)
    }

    fn is_near(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-9
    }

    #[test]
    fn the_terms_are_the_formula_in_seconds() {
        let found = terms(&request(6_000, 250.0), &state(10, 1_200, 60_000), 2_400);
        assert!(is_near(found.wait, 0.1), "{found:?}");
        assert!(is_near(found.compute, 0.2), "{found:?}");
        // One request that comes later, the ten that are there, and as many behind them.
        assert!(is_near(found.delay, 0.2 * 21.0), "{found:?}");
        let answer = 250.0 * (2.0 * 2e-5 * 10.0 + 3e-8 * (10.0 * 6_000.0 + 60_000.0));
        assert!(is_near(found.answer, answer), "{found:?}");
        assert_eq!((found.slot, found.adapter), (0.0, 0.0));
    }

    #[test]
    fn answers_that_go_on_beside_prompts_are_not_delayed_but_those_that_come_later_are() {
        let request = request(1_200, 250.0);
        let delay = |overlap, waiting_prompts| {
            let speed = Speed {
                overlap,
                ..Speed::default()
            };
            let state = State {
                speed,
                ..state(20, 50_000, 100_000)
            };
            let table = Table {
                waiting_prompts,
                states: vec![state],
                ..Table::default()
            };
            let settings = Settings::default();
            let costs = Costs::new(&settings, &request, &table);
            costs.terms(&state, 1_200).delay
        };
        let one = 0.1;
        assert!(is_near(delay(0.0, 0.0), one * 41.0));
        assert!(is_near(delay(0.5, 0.0), one * 21.0));
        assert!(is_near(delay(1.0, 0.0), one));
        assert!(is_near(delay(1.0, 1.5), one * 5.5));
        assert!(is_near(delay(0.0, 1.5), one * 45.5));
    }

    #[test]
    fn a_cached_prefix_is_left_once_its_worker_has_many_answers_to_generate() {
        // One system prompt of 6,200 tokens at one of two workers: the fortieth request is better off at the idle one.
        let request = request(6_260, 256.0);
        let warm = |n: u32| terms(&request, &state(n, 0, u64::from(n) * 6_260), 60).sum();
        let idle = terms(&request, &state(0, 0, 0), 6_260).sum();
        assert!(warm(3) < idle, "{} {idle}", warm(3));
        assert!(warm(40) > idle, "{} {idle}", warm(40));
    }

    #[test]
    fn a_prefix_that_many_ask_for_is_copied_while_its_worker_is_hardly_busier_than_others() {
        let request = request(6_260, 256.0);
        let cheapest_is_warm = |requests: f64, others: u32| {
            let shared = types::SharedPrefix {
                tokens: 6_200,
                requests,
                ..types::SharedPrefix::default()
            };
            let (settings, table) = (
                Settings::default(),
                Table {
                    shared,
                    ..Table::new(&[])
                },
            );
            let costs = Costs::new(&settings, &request, &table);
            let at = |n: u32, new| costs.terms(&state(n, 0, u64::from(n) * 6_260), new).sum();
            at(others + 60, 60) < at(others, 6_260)
        };
        // Others stand still for half a second once, and the next request would have to pay that again.
        assert!(cheapest_is_warm(0.0, 30));
        assert!(!cheapest_is_warm(40.0, 30));
        // What is new for all workers is paid in full.
        let (settings, shared) = (
            Settings::default(),
            types::SharedPrefix {
                key: None,
                tokens: 0,
                requests: 40.0,
            },
        );
        let table = Table {
            shared,
            ..Table::new(&[])
        };
        let costs = Costs::new(&settings, &request, &table);
        let state = state(30, 0, 0);
        assert_eq!(costs.terms(&state, 6_260), terms(&request, &state, 6_260));
    }

    #[test]
    fn a_worker_that_is_idle_for_a_moment_does_not_stay_idle() {
        // The next turn of a session whose worker has three requests, and an idle worker whose sessions come back soon.
        let request = request(10_000, 40.0);
        let at = |requests: u32, usual: f64, new_tokens| {
            let state = State {
                delayed: types::delayed(requests, usual),
                ..state(requests, 0, u64::from(requests) * 9_000)
            };
            terms(&request, &state, new_tokens).sum()
        };
        assert!(at(3, 3.0, 1_100) > at(0, 0.0, 2_600));
        assert!(at(3, 3.0, 1_100) < at(0, 5.0, 2_600));
        // What it has now counts, if that is more.
        assert_eq!(at(3, 1.0, 1_100), at(3, 3.0, 1_100));
    }

    #[test]
    fn a_request_without_a_free_slot_waits_for_its_part_of_an_answer() {
        let full = State {
            slots: 8,
            ..state(8, 0, 0)
        };
        let request = request(100, 250.0);
        let found = terms(&request, &full, 0);
        let step = 0.01 + 2e-5 * 8.0;
        assert!(is_near(found.slot, 250.0 * step / 8.0), "{found:?}");
        let free = State { slots: 9, ..full };
        assert_eq!(terms(&request, &free, 0).slot, 0.0);
        // The engine says that some wait, so its slots, or its memory, are taken.
        let waiting = State { waiting: 4, ..free };
        let found = terms(&request, &waiting, 0);
        assert!(is_near(found.slot, 4.0 / 9.0 * 250.0 * step), "{found:?}");
    }

    #[test]
    fn an_adapter_that_has_to_be_loaded_costs_its_time() {
        let lacks = State {
            lacks_adapter: true,
            ..state(0, 0, 0)
        };
        let request = request(1_000, 250.0);
        let (has, lacks) = (
            terms(&request, &state(0, 350, 0), 1_000).sum(),
            terms(&request, &lacks, 1_000).sum(),
        );
        assert!(has < lacks);
        assert!(terms(&request, &state(0, 370, 0), 1_000).sum() > lacks);
    }

    #[test]
    fn the_first_token_is_expected_after_the_wait_and_the_end_after_the_answer() {
        let (settings, table) = (Settings::default(), Table::new(&[]));
        let request = request(1_200, 101.0);
        let costs = Costs::new(&settings, &request, &table);
        let state = state(0, 1_200, 0);
        let expected = costs.expected(&state, &costs.terms(&state, 600));
        let step = 0.01 + 2e-5 + 3e-8 * 1_200.0;
        assert!(is_near(expected.first_token, 0.15 + step), "{expected:?}");
        assert!(
            is_near(expected.end(101.0), 0.15 + 101.0 * step),
            "{expected:?}"
        );
    }

    #[test]
    fn tokens_in_cpu_memory_and_on_disk_save_a_part() {
        let (settings, table, request) =
            (Settings::default(), Table::new(&[]), request(1_000, 0.0));
        let costs = Costs::new(&settings, &request, &table);
        let new = |gpu, cpu, disk| costs.new_tokens(&Cached { gpu, cpu, disk });
        assert_eq!(new(900, 0, 0), 100);
        assert_eq!(new(0, 900, 0), 280);
        assert_eq!(new(0, 0, 900), 640);
        assert_eq!(new(500, 200, 200), 260);
        // Counted in whole blocks, the prefix can be longer than the prompt.
        assert_eq!(new(1_008, 0, 0), 0);
    }
}
