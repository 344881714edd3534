//! For each model the workers that serve it. Pure.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::value::RawValue;

use super::context_lengths::ContextLengths;
use super::engine::TokenIdsField;
use super::events::Events;
use super::health::Health;
use super::kv_transfer::CompatibilityKey;
use super::model_set::ModelSet;
use super::rank_places::{PinnedApi, RankPlaces, pinnable_ranks};
use super::responses_api::ChatWorkers;
use super::speed::GroupSpeed;
use super::status::Status;
use super::worker::{Role, Worker};
use crate::ids::{Model, WorkerId, WorkerIndex};

/// The workers that can take a model's next request, or one leg of it.
#[derive(Debug)]
pub struct Group {
    pub model: Model,
    /// A model and its adapters share them.
    pub members: Arc<Members>,
    /// The model's entry for `/v1/models`, from one of its workers: one that takes the longest prompts.
    pub card: Box<RawValue>,
    /// Base models of its workers, under which their cached blocks are indexed; nearly always one.
    pub bases: Vec<Model>,
    /// True for a LoRA adapter: its cached blocks are not shared with the base model.
    pub is_adapter: bool,
    /// True for an adapter that some workers of its base model do not list: they may have loaded it since they were asked.
    pub is_partial: bool,
}

/// The workers of a group, in their order.
#[derive(Debug, Default)]
pub struct Members {
    /// Decode workers, then those of role `both`, then prefill workers, so that the workers for a leg are a
    /// range of indices.
    pub workers: Vec<Arc<Worker>>,
    /// The number of workers of role `decode`.
    pub decode_only: usize,
    /// The number of workers of role `prefill`.
    pub prefill_only: usize,
    /// For each of `workers`: decides whether it and another worker are a pair.
    compatibility_keys: Vec<CompatibilityKey>,
    /// Worker id -> index in `workers`.
    worker_indices: FxHashMap<WorkerId, WorkerIndex>,
    /// For each of `workers`, how many of its ranks publish KV events.
    pub event_ranks: Vec<u32>,
    /// The places of requests that can be pinned to a rank, by API; `None` if no worker has several.
    pub(super) chat_ranks: Option<RankPlaces>,
    pub(super) responses_ranks: Option<RankPlaces>,
    /// How many of `workers` are sent chat completions in place of requests of the Responses API.
    pub chat_workers: ChatWorkers,
    /// For each of `workers`, whether it is one of those.
    chat_only: Vec<bool>,
    /// The ids of `workers` that take a request to abort a request by its id.
    pub aborting_by_id: Vec<WorkerId>,
    /// The field of a request from which each of `workers` reads token ids; the default if they differ.
    pub token_ids_field: TokenIdsField,
    /// The ids of `workers` that read the token ids of a chat's prompt from `input_ids`, and not from `kv_transfer_params`.
    pub taking_input_ids: Vec<WorkerId>,
    /// The workers that do not serve Anthropic's Messages.
    pub without_messages: Vec<WorkerId>,
    /// Which of them take less than others.
    pub context_lengths: ContextLengths,
    pub speed: GroupSpeed,
}

impl Deref for Group {
    type Target = Members;

    fn deref(&self) -> &Members {
        &self.members
    }
}

impl Members {
    /// Whether the worker is sent chat completions in place of requests of the Responses API.
    pub fn speaks_chat_only(&self, worker: WorkerId) -> bool {
        let index = self.index_of(worker);
        index.is_some_and(|index| self.chat_only[index.get()])
    }

    /// `None` for a worker that is down or serves another model.
    #[inline]
    pub fn index_of(&self, worker: WorkerId) -> Option<WorkerIndex> {
        self.worker_indices.get(&worker).copied()
    }

    #[inline]
    pub fn worker(&self, index: WorkerIndex) -> &Arc<Worker> {
        &self.workers[index.get()]
    }

    /// How many ranks of a worker publish KV events.
    #[inline]
    pub fn event_ranks(&self, index: WorkerIndex) -> u32 {
        self.event_ranks[index.get()]
    }

    pub fn is_pair(&self, prefill: WorkerIndex, decode: WorkerIndex) -> bool {
        let keys = &self.compatibility_keys;
        keys[prefill.get()].is_compatible(&keys[decode.get()])
    }

    /// Whether a request may name a dp rank although it is not known which of the workers gets it: each has as many ranks as
    /// each other one, by its own account.
    pub fn has_alike_ranks(&self, api: PinnedApi) -> bool {
        let ranks = match api {
            PinnedApi::Chat => &self.chat_ranks,
            PinnedApi::Responses => &self.responses_ranks,
        };
        ranks.as_ref().is_some_and(|ranks| ranks.are_alike)
    }

    /// Indices of the workers that take decode legs and whole requests.
    pub fn decode(&self) -> Range<WorkerIndex> {
        indices(0, self.workers.len() - self.prefill_only)
    }

    /// Indices of the workers without a role of their own.
    pub fn both(&self) -> Range<WorkerIndex> {
        indices(self.decode_only, self.workers.len() - self.prefill_only)
    }

    /// Indices of the workers that take prefill legs.
    pub fn prefill(&self) -> Range<WorkerIndex> {
        indices(self.decode_only, self.workers.len())
    }

    pub fn decode_workers(&self) -> &[Arc<Worker>] {
        self.in_range(self.decode())
    }

    pub fn prefill_workers(&self) -> &[Arc<Worker>] {
        self.in_range(self.prefill())
    }

    fn in_range(&self, range: Range<WorkerIndex>) -> &[Arc<Worker>] {
        &self.workers[range.start.get()..range.end.get()]
    }

    /// `usable`: in the order in which they joined.
    fn new(mut usable: Vec<&Status>, topology: &str) -> Self {
        // A stable sort: workers of one role stay in the order in which they joined.
        usable.sort_by_key(|status| match status.worker.role {
            Role::Decode => 0,
            Role::Both => 1,
            Role::Prefill => 2,
        });
        let count = |role| {
            let of_role = usable.iter().filter(|status| status.worker.role == role);
            of_role.count()
        };
        let mut members = Self {
            decode_only: count(Role::Decode),
            prefill_only: count(Role::Prefill),
            ..Self::default()
        };
        let are_reported = usable
            .iter()
            .all(|status| matches!(status.worker.events, Events::Auto));
        let ranks = |api| {
            let ranks = usable.iter().map(|status| pinnable_ranks(status, api));
            RankPlaces::new(&ranks.collect::<Vec<u32>>(), are_reported)
        };
        members.chat_ranks = ranks(PinnedApi::Chat);
        members.responses_ranks = ranks(PinnedApi::Responses);
        let mut fields = usable
            .iter()
            .map(|status| status.facts.capabilities().token_ids_field);
        members.token_ids_field = match fields.next() {
            Some(first) if fields.all(|field| field == first) => first,
            _ => TokenIdsField::default(),
        };
        members.context_lengths = ContextLengths::of(
            usable
                .iter()
                .map(|status| (status.worker.id, status.facts.max_model_len)),
        );
        for (worker_index, status) in usable.into_iter().enumerate() {
            members
                .worker_indices
                .insert(status.worker.id, WorkerIndex::new(worker_index));
            members.event_ranks.push(status.event_ranks() as u32);
            members.chat_only.push(status.speaks_chat_only());
            if status.facts.capabilities().aborts_by_id {
                members.aborting_by_id.push(status.worker.id);
            }
            if status.facts.capabilities().token_ids_field == TokenIdsField::InputIds {
                members.taking_input_ids.push(status.worker.id);
            }
            if status.facts.lacks_messages {
                members.without_messages.push(status.worker.id);
            }
            members.workers.push(status.worker.clone());
            let key = status.compatibility_key(topology);
            members.compatibility_keys.push(key);
        }
        let chat = members.chat_only.iter().filter(|is_chat| **is_chat);
        members.chat_workers = ChatWorkers::of(chat.count(), members.workers.len());
        members.set_speed();
        members
    }

    /// To be called once a second.
    pub(super) fn set_speed(&self) {
        let loads = self.workers.iter().map(|worker| &worker.load);
        let seen = loads.map(|load| (load.speed.prompt_token(), load.usual_waiting_prompts()));
        self.speed.set(seen);
    }
}

/// One group for each set of workers: who looks at the workers of a model and of its thousand adapters looks at each once.
pub fn with_different_members<'g>(
    groups: impl Iterator<Item = &'g Arc<Group>>,
) -> impl Iterator<Item = &'g Arc<Group>> {
    let mut seen = FxHashSet::default();
    groups.filter(move |group| seen.insert(Arc::as_ptr(&group.members)))
}

fn indices(start: usize, end: usize) -> Range<WorkerIndex> {
    WorkerIndex::new(start)..WorkerIndex::new(end)
}

/// The workers that serve the same models: indices of those that are up, and the first of all.
struct Servers<'a> {
    set: &'a ModelSet,
    first: &'a Status,
    usable: Vec<usize>,
}

/// What is known of a model before its members are: the positions of the sets that it is in.
struct Found<'a> {
    sets: Vec<usize>,
    first: &'a Status,
    is_adapter: bool,
}

/// Takes the time of the workers, and of the models of each *different* set, not of every pair of a worker and a model.
pub(super) fn group(
    workers: &[(Status, Arc<ModelSet>)],
    topology: &str,
) -> BTreeMap<Model, Arc<Group>> {
    let mut positions: FxHashMap<*const ModelSet, usize> = FxHashMap::default();
    let mut all: Vec<Servers<'_>> = Vec::new();
    for (worker, (status, set)) in workers.iter().enumerate() {
        let position = *positions.entry(Arc::as_ptr(set)).or_insert(all.len());
        if position == all.len() {
            all.push(Servers {
                set,
                first: status,
                usable: Vec::new(),
            });
        }
        if status.health == Health::Up && !status.draining {
            all[position].usable.push(worker);
        }
    }
    let is_usable = |servers: &&Servers<'_>| !servers.usable.is_empty();
    let mut sets_of_base: FxHashMap<&Model, usize> = FxHashMap::default();
    for base in all
        .iter()
        .filter(is_usable)
        .filter_map(|servers| servers.set.base.as_ref())
    {
        *sets_of_base.entry(base).or_default() += 1;
    }
    // In no order yet: where each worker has adapters of its own, a model is looked up for each pair of these.
    let mut models: FxHashMap<&Model, Found<'_>> = FxHashMap::default();
    for (position, servers) in all.iter().enumerate() {
        for (model, is_adapter) in &servers.set.models {
            let found = models.entry(model).or_insert_with(|| Found {
                sets: Vec::new(),
                first: servers.first,
                is_adapter: *is_adapter,
            });
            found.sets.push(position);
        }
    }
    // With the worker that takes the longest prompts, if they are not alike.
    let mut members_of: FxHashMap<Vec<usize>, (Arc<Members>, Option<usize>)> = FxHashMap::default();
    let groups = models.into_iter().map(|(model, found)| {
        let mut bases: Vec<Model> = Vec::new();
        for base in found
            .sets
            .iter()
            .filter_map(|at| all[*at].set.base.as_ref())
        {
            if !bases.contains(base) {
                bases.push(base.clone());
            }
        }
        let usable = found.sets.iter().map(|at| &all[*at]).filter(is_usable);
        let with_base = usable.filter(|servers| servers.set.base.is_some()).count();
        let of_bases: usize = bases.iter().filter_map(|base| sets_of_base.get(base)).sum();
        let (members, longest) = match members_of.get(&found.sets) {
            Some(known) => known.clone(),
            None => {
                let usable = found.sets.iter().flat_map(|at| &all[*at].usable);
                let mut usable: Vec<usize> = usable.copied().collect();
                usable.sort_unstable();
                let status = |worker: &usize| &workers[*worker].0;
                let members = Members::new(usable.iter().map(status).collect(), topology);
                let longest = if members.context_lengths.are_alike() {
                    None
                } else {
                    usable
                        .into_iter()
                        .max_by_key(|worker| status(worker).facts.max_model_len)
                };
                let known = (Arc::new(members), longest);
                members_of.insert(found.sets, known.clone());
                known
            }
        };
        let card_of = longest.map_or(found.first, |worker| &workers[worker].0);
        let group = Group {
            model: model.clone(),
            members,
            card: card_of.facts.models[model].clone(),
            bases,
            is_adapter: found.is_adapter,
            is_partial: found.is_adapter && with_base < of_bases,
        };
        (model.clone(), Arc::new(group))
    });
    groups.collect()
}
