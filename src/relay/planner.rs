//! Makes the plan of a request: finds its model's workers, and its prompt's tokens and blocks.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::HeaderMap;

use super::continuation::{self, Refusal};
use super::core::Relay;
use super::job::{ChatForm, Error, ToolLoss};
use super::kv_transfer::Legs;
use super::plan::{Plan, token_ids_asked};
use super::prompt::prompt_blocks::{Prompt, TokenBlocks};
use super::prompt::prompt_token_ids;
use super::prompt::tokens::PromptTokens;
use super::request::body_edit;
use super::request::target::Names;
use super::settings::PinRanks;
use crate::fleet::kv_transfer::Connector;
use crate::fleet::model_lookup::Lookup;
use crate::fleet::{Group, PinnedApi, Snapshot};
use crate::ids::Tenant;
use crate::kv::tokenizer_check::PromptSource;
use crate::prompt::{self, Api, PeekedBody};
use crate::{kv, observe, routing};

/// How long a request waits for the first probes of workers: the first command after a start is to work, and a worker that
/// answers its probe takes some milliseconds.
const FIRST_PROBES: Duration = Duration::from_secs(1);
/// The Retry-After of an answer when no worker is usable: about half of the time that health checks take to find a
/// worker healthy again.
pub(super) const NO_WORKER_RETRY_AFTER: Duration = Duration::from_secs(1);

/// How much of a prompt's start is hashed for replicas that hear of no other. About 1,000 tokens: less is often the
/// same for all prompts of an application, more differs between the turns of a short conversation.
const PREFIX_KEY_BYTES: u64 = 4_096;

impl Relay {
    pub(super) async fn plan(
        &self,
        api: Api,
        headers: &HeaderMap,
        peek: &mut PeekedBody<'_>,
        body: &Bytes,
    ) -> Result<Arc<Plan>, Error> {
        let group = self.group_or_look_up(peek.model.as_deref()).await?;
        let model = self.models.of(&group.model);
        let salt = peek.cache_salt.as_deref();
        let source = match api {
            _ if peek.token_ids.is_some() => PromptSource::TokenIds,
            Api::Completions => PromptSource::Text,
            _ => PromptSource::Rendered,
        };
        let found = match peek.token_ids.take() {
            Some(ids) => Some(PromptTokens::complete(ids)),
            None if api.generates() => self.tokens.of(api, &group, headers, body).await,
            None => None,
        };
        let measure = Measure::new(&peek.prompt, found.as_ref(), model.bytes_per_token);
        let blocks = if api.generates() {
            let start = kv::text_block::chain_root(&group.model, salt);
            let blocks = peek.prompt.blocks.iter();
            kv::text_block::chain(
                start,
                blocks.map(|block| (block.hash, measure.tokens(block.bytes))),
            )
        } else {
            Vec::new()
        };
        let exact = found.as_ref().map(|found| {
            let mut exact = TokenBlocks::new(&self.caches.indexes, &group, salt, &found.ids);
            exact.source = source;
            exact.ends_early = found.is_partial();
            exact.may_be_late = found.may_be_late;
            exact.keep(&group, &self.caches.tokenizer_check, &found.ids);
            for keys in exact.prefix_keys() {
                self.caches.unconfirmed.prefetch(keys);
            }
            exact
        });
        let sends_ids = model.send_tokens && !peek.is_echo;
        let with_ids = match &found {
            Some(found) if sends_ids && !found.is_partial() => {
                prompt_token_ids::spliced(group.token_ids_field, api, body, &found.ids)
            }
            _ => None,
        };
        let connector = self
            .prefill_decode
            .as_ref()
            .map(|disaggregation| disaggregation.connector);
        let sent = with_ids.as_ref().unwrap_or(body);
        let continuation = model.stream_continuation.filter(|_| peek.is_stream);
        let continuation = continuation.map(|settings| {
            Box::new(if measure.prompt_tokens > settings.max_tokens {
                Err(Refusal::TooLong)
            } else if connector.is_some_and(|connector| !connector.decodes_alone()) {
                // SGLang: no ids of streamed chats, and no decode worker goes on alone.
                Err(Refusal::NoTokenIds)
            } else {
                continuation::Request::read(api, sent)
            })
        });
        let legs = connector.map(|connector| {
            let sent = token_ids_asked(&continuation).unwrap_or(sent);
            Legs::for_connector(connector, api, sent)
        });
        // Workers that report what they have cached are known without the other replicas.
        let is_reported = exact.is_some() && !group.event_ranks.contains(&0);
        // Rounding must not make the prompt shorter than its blocks.
        let in_blocks = blocks.last().map_or(0, |block| block.end_tokens);
        let prompt_tokens = measure.prompt_tokens.max(in_blocks);
        let answer_max = if api.generates() {
            u32::try_from(peek.max_tokens.unwrap_or(1)).unwrap_or(u32::MAX)
        } else {
            0
        };
        // On the heap at once, so that no future has a copy.
        Ok(Arc::new(Plan {
            api,
            context_tokens: prompt_tokens.saturating_add(answer_max),
            request: routing::Request {
                prompt_tokens: if api.computes_prompt() {
                    prompt_tokens
                } else {
                    0
                },
                answer_tokens: if api.generates() {
                    let most = peek.max_tokens.map_or(f64::INFINITY, |most| most as f64);
                    model.counts.answers.mean().min(most)
                } else {
                    0.0
                },
                affinity: model.affinity(headers, peek),
                prefix_key: routing::prefix_key(&blocks, first_blocks(&peek.prompt)),
                is_alone: self.peers.is_alone() && !is_reported,
                ticket: model.next_ticket(),
                seed: fastrand::u64(..),
            },
            is_stream: peek.is_stream,
            queued: Duration::ZERO,
            continuation,
            resumed: None,
            pinned: pinned_api(self.settings.pin_ranks, connector, api),
            rank_refused_by: None,
            group,
            model,
            prompt: Prompt { blocks, exact },
            body: with_ids,
            legs,
        }))
    }

    /// The number of a prompt's tokens, if the router knows all of them. `chat`: as in [`Job`](super::Job).
    pub async fn count_tokens(
        &self,
        tenant: Tenant,
        api: Api,
        headers: &HeaderMap,
        body: &Bytes,
        model: Option<&str>,
        chat: Option<&dyn ChatForm>,
    ) -> Result<Option<usize>, Error> {
        self.check_right(tenant, model)?;
        let read =
            || body_edit::read_again(api, body, self.block_bytes(), model.unwrap_or_default());
        let name = model.and_then(|model| self.names().get(model));
        let now = observe::now();
        let redirected = name.and_then(|_| self.redirected(headers, &read(), body, tenant, now));
        let (model, body) = match &redirected {
            Some((_, candidate, body)) => (Some(&*candidate.model), body),
            None => (model, body),
        };
        let group = self.group_or_look_up(model).await;
        let group = group.map_err(|error| self.without_others(tenant, error))?;
        let chat = chat.filter(|_| self.sends_chat(model));
        let converted = chat.and_then(|chat| chat.chat_body(body, ToolLoss::AsConfigured).ok());
        let (api, body) = match &converted {
            Some(body) => (Api::Chat, body),
            None => (api, body),
        };
        let found = self.tokens.of(api, &group, headers, body).await;
        Ok(found
            .filter(|found| !found.is_partial())
            .map(|found| found.ids.len()))
    }

    /// An error if the model does not exist for a tenant. Whether a worker can take a request now is not asked.
    pub async fn check_model(&self, tenant: Tenant, model: &str) -> Result<(), Error> {
        self.check_right(tenant, Some(model))?;
        if self.names().get(model).is_some() {
            return Ok(());
        }
        match self.group_or_look_up(Some(model)).await {
            Err(error @ Error::UnknownModel { .. }) => Err(self.without_others(tenant, error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Why a tenant finds no model under a name that no worker serves, or that it may not use: one that a worker may
    /// serve later lacks a worker, and is not unknown. Counts the error; `api`: as in [`Relay::count_unsent`].
    pub fn missing(&self, api: &'static str, tenant: Tenant, name: &str) -> Error {
        let error = if self.may_use(tenant, name) && self.may_know(name) {
            no_worker(Some(name), self.knows(name))
        } else {
            let known = self.names().known(&self.fleet().snapshot());
            let model = observe::shortened(name).to_owned();
            self.without_others(tenant, Error::UnknownModel { model, known })
        };
        self.models.count_unanswered(None, api, error.outcome());
        error
    }

    /// The model's workers. If no worker is known to serve it, they are asked once more: it may be an adapter that was loaded
    /// just now. A model that a worker may serve later lacks a worker, which clients wait for; it is not unknown.
    async fn group_or_look_up(&self, model: Option<&str>) -> Result<Arc<Group>, Error> {
        let found = match (self.group(model), model) {
            (Err(Error::UnknownModel { .. }), Some(name)) => {
                // Boxed, so that other requests do not carry its state.
                let lookup = Box::pin(self.fleet().look_up(name)).await;
                if lookup != Lookup::Off {
                    let outcome = [lookup.as_str()];
                    self.metrics.model_lookups.with_label_values(&outcome).inc();
                }
                self.group(model)
            }
            (Err(Error::NoWorker { .. }), _) if self.fleet().snapshot().has_unprobed_workers() => {
                Box::pin(self.fleet().first_probes(model, FIRST_PROBES)).await;
                self.group(model)
            }
            (Ok(group), _) if group.is_partial => {
                self.fleet().look_for_adapters();
                Ok(group)
            }
            (found, _) => found,
        };
        match (found, model) {
            (Err(Error::UnknownModel { .. }), Some(name)) if self.may_know(name) => {
                Err(no_worker(model, self.knows(name)))
            }
            (found, _) => found,
        }
    }

    pub(super) fn group(&self, model: Option<&str>) -> Result<Arc<Group>, Error> {
        let snapshot = self.fleet().snapshot();
        let group = match model {
            Some(name) => snapshot.models.get(name),
            None => snapshot.only_model(),
        };
        group
            .cloned()
            .ok_or_else(|| no_group(&snapshot, self.names(), model))
    }

    /// Updates the model's workers to the latest snapshot.
    pub(super) fn renew(&self, plan: &mut Arc<Plan>) {
        if let Some(group) = self.fleet().snapshot().models.get(&plan.group.model) {
            Plan::own(plan).group = group.clone();
        }
    }
}

/// The number of a prompt's blocks within its first [`PREFIX_KEY_BYTES`]. The same for all prompts that start with
/// these bytes, and more than a shorter prompt has.
fn first_blocks(prompt: &prompt::HashedPrompt) -> usize {
    let mut bytes = 0;
    let within = prompt.blocks.iter().take_while(|block| {
        bytes += u64::from(block.bytes);
        bytes <= PREFIX_KEY_BYTES
    });
    match within.count() {
        count if bytes > PREFIX_KEY_BYTES => count,
        count => count + 1,
    }
}

/// How requests of an API are pinned to a rank, if they may be. Of a request with two legs, both are. MoRI-IO's workers have
/// one rank each.
fn pinned_api(pin_ranks: PinRanks, connector: Option<Connector>, api: Api) -> Option<PinnedApi> {
    if pin_ranks == PinRanks::Never || connector == Some(Connector::Moriio) {
        return None;
    }
    match api {
        Api::Chat | Api::Completions | Api::Messages | Api::Generate => Some(PinnedApi::Chat),
        Api::Responses => Some(PinnedApi::Responses),
        Api::Embeddings
        | Api::Rerank
        | Api::Tokenize
        | Api::Detokenize
        | Api::CountTokens
        | Api::Other => None,
    }
}

/// Converts bytes of the prompt to tokens.
struct Measure {
    prompt_tokens: u32,
    tokens_per_byte: f64,
}

impl Measure {
    fn new(
        prompt: &prompt::HashedPrompt,
        found: Option<&PromptTokens>,
        bytes_per_token: f64,
    ) -> Self {
        let of_bytes = |bytes: u64| bytes as f64 / bytes_per_token;
        let tokens = match found {
            // The image and the text after it are estimated by their bytes.
            Some(found) if found.is_partial() => of_bytes(prompt.bytes).max(found.ids.len() as f64),
            Some(found) => found.ids.len() as f64,
            None => of_bytes(prompt.bytes),
        };
        Self {
            prompt_tokens: tokens as u32,
            tokens_per_byte: tokens / prompt.bytes.max(1) as f64,
        }
    }

    fn tokens(&self, bytes: u32) -> u32 {
        (f64::from(bytes) * self.tokens_per_byte) as u32
    }
}

fn no_group(fleet: &Snapshot, names: &Names, model: Option<&str>) -> Error {
    let known = names.known(fleet);
    match model {
        // Some workers were not asked for their models yet, so the client should retry.
        _ if known.is_empty() => {}
        Some(_) if fleet.has_unprobed_workers() => {}
        Some(model) => {
            return Error::UnknownModel {
                model: observe::shortened(model).to_owned(),
                known,
            };
        }
        None => return Error::NoModel { known },
    }
    no_worker(model, true)
}

fn no_worker(model: Option<&str>, is_known: bool) -> Error {
    Error::NoWorker {
        model: observe::shortened(model.unwrap_or_default()).to_owned(),
        is_known,
        retry_after: NO_WORKER_RETRY_AFTER,
    }
}
