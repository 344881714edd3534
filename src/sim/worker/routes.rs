//! The routes of a simulated engine: vLLM's, and its own below `/sim`.

use std::sync::Arc;

use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde_json::json;

use super::error::ApiError;
use super::fault_injection::delay_tokenization;
use super::http_answer::{Answer, Result, empty, error, json_or_error, ok, ok_json, typed};
use super::request::{self, Api};
use super::shared::Shared;
use super::transfer::blocks;
use super::{body, generate, lists, metrics, pooling, tokenizer, tokens_in_out};
use crate::observe;
use crate::sim::fault::Faults;

/// Which of a worker's addresses a connection came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listener {
    Api,
    /// The bootstrap server of a Mooncake prefill engine.
    Bootstrap,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    Generate(Api),
    TokensInOut,
    Render(Api),
    Embeddings,
    Rerank,
    Models,
    Health,
    IsSleeping,
    Version,
    Metrics,
    Tokenize,
    CountTokens,
    Detokenize,
    ResetPrefixCache,
    LoadAdapter,
    UnloadAdapter,
    KvEventSources,
    SimRequests,
    SimCache,
    SimFaults,
    SimTransfers,
    SimBlocks,
    SimRelease,
    Bootstrap,
    /// `/v1/responses/{id}` and below: a simulated engine stores no responses.
    StoredResponse,
}

impl Route {
    /// Requests of clients, as opposed to those of routers, tests and other engines.
    pub(crate) fn is_recorded(self) -> bool {
        !matches!(
            self,
            Self::Health
                | Self::IsSleeping
                | Self::Metrics
                | Self::LoadAdapter
                | Self::UnloadAdapter
                | Self::KvEventSources
                | Self::SimRequests
                | Self::SimCache
                | Self::SimFaults
                | Self::SimTransfers
                | Self::SimBlocks
                | Self::SimRelease
                | Self::Bootstrap
        )
    }
}

pub(crate) fn route(listener: Listener, path: &str) -> Option<(Method, Route)> {
    if listener == Listener::Bootstrap {
        return (path == "/query").then_some((Method::GET, Route::Bootstrap));
    }
    let found = match path {
        "/v1/chat/completions" => (Method::POST, Route::Generate(Api::Chat)),
        "/v1/completions" => (Method::POST, Route::Generate(Api::Completions)),
        "/v1/responses" => (Method::POST, Route::Generate(Api::Responses)),
        "/inference/v1/generate" => (Method::POST, Route::TokensInOut),
        "/v1/chat/completions/render" => (Method::POST, Route::Render(Api::Chat)),
        "/v1/completions/render" => (Method::POST, Route::Render(Api::Completions)),
        "/v1/responses/render" => (Method::POST, Route::Render(Api::Responses)),
        "/v1/messages" => (Method::POST, Route::Generate(Api::Messages)),
        "/v1/messages/count_tokens" => (Method::POST, Route::CountTokens),
        "/v1/embeddings" => (Method::POST, Route::Embeddings),
        "/v1/rerank" | "/rerank" => (Method::POST, Route::Rerank),
        "/v1/models" => (Method::GET, Route::Models),
        "/health" | "/ping" => (Method::GET, Route::Health),
        "/is_sleeping" => (Method::GET, Route::IsSleeping),
        "/version" => (Method::GET, Route::Version),
        "/metrics" => (Method::GET, Route::Metrics),
        "/tokenize" => (Method::POST, Route::Tokenize),
        "/detokenize" => (Method::POST, Route::Detokenize),
        "/reset_prefix_cache" => (Method::POST, Route::ResetPrefixCache),
        "/v1/load_lora_adapter" => (Method::POST, Route::LoadAdapter),
        "/v1/unload_lora_adapter" => (Method::POST, Route::UnloadAdapter),
        "/kv_event_sources" => (Method::GET, Route::KvEventSources),
        "/sim/requests" => (Method::GET, Route::SimRequests),
        "/sim/cache" => (Method::GET, Route::SimCache),
        "/sim/faults" => (Method::POST, Route::SimFaults),
        "/sim/kv_transfers" => (Method::GET, Route::SimTransfers),
        "/sim/blocks" => (Method::POST, Route::SimBlocks),
        "/sim/release" => (Method::POST, Route::SimRelease),
        _ => {
            let below = path.strip_prefix("/v1/responses/")?;
            match below.split_once('/') {
                None => (Method::GET, Route::StoredResponse),
                Some((_, "cancel")) => (Method::POST, Route::StoredResponse),
                Some(_) => return None,
            }
        }
    };
    Some(found)
}

pub(crate) async fn dispatch(
    shared: &Arc<Shared>,
    route: Route,
    parts: &Parts,
    body: &Bytes,
    faults: Faults,
) -> Result<Answer> {
    let answer = match route {
        Route::Generate(api) => return generate::answer(shared, api, parts, body, faults).await,
        Route::TokensInOut => {
            let body = match tokens_in_out::as_completion(body) {
                Ok(body) => body,
                Err(refused) => return Ok(error(&refused)),
            };
            return generate::answer(shared, Api::Completions, parts, &body, faults).await;
        }
        Route::Render(api) => generate::rendered(shared, api, parts, body, &faults).await,
        Route::Embeddings => {
            let read = || pooling::embed(shared, body);
            return pooling::answer(shared, parts, faults, read).await;
        }
        Route::Rerank => {
            let read = || pooling::rank(shared, body);
            return pooling::answer(shared, parts, faults, read).await;
        }
        Route::Models => ok_json(&lists::models(
            &shared.settings,
            &shared.models.list(),
            shared.started.as_secs(),
        )),
        Route::Health if faults.unhealthy || shared.life.is_core_dead() => {
            empty(StatusCode::SERVICE_UNAVAILABLE)
        }
        Route::Health => empty(StatusCode::OK),
        Route::IsSleeping => ok_json(&json!({"is_sleeping": faults.asleep})),
        Route::Version => ok(lists::VERSION),
        Route::Metrics => metrics_page(shared),
        Route::Tokenize => {
            delay_tokenization(&faults).await;
            let tokens = match &shared.own_tokens {
                Some(own) => own.tokenized(body),
                None => request::read_tokenize(body, &shared.models.list()),
            };
            let context_tokens = shared.settings.context_tokens();
            json_or_error(tokens.map(|tokens| lists::tokens(&tokens, context_tokens)))
        }
        Route::CountTokens => {
            let count = match &shared.own_tokens {
                Some(own) => own.count(body),
                None => request::count_messages(body, &shared.models.list()),
            };
            json_or_error(count.map(|count| json!({"input_tokens": count})))
        }
        Route::Detokenize => {
            let tokens = lists::read_detokenize(body);
            json_or_error(tokens.map(|tokens| json!({"prompt": tokenizer::decode(&tokens)})))
        }
        Route::ResetPrefixCache => ok_json(&json!({"success": shared.ranks.reset()})),
        Route::LoadAdapter => text(shared.models.load(body)),
        Route::UnloadAdapter => text(shared.models.unload(body)),
        Route::KvEventSources => ok_json(&shared.ranks.sources()),
        Route::SimRequests => ok_json(&shared.recorder.stats()),
        Route::SimCache => ok_json(&shared.ranks.all_cache_contents()),
        Route::SimFaults => match Faults::from_json(body) {
            Ok(faults) => {
                let answer = ok_json(&faults);
                shared.set_faults(faults);
                answer
            }
            Err(message) => error(&ApiError::bad_request(message)),
        },
        Route::SimTransfers => ok_json(&shared.kv_transfers()),
        Route::SimBlocks => ok_json(&blocks::fetch(shared, body).await?),
        Route::SimRelease => {
            blocks::release(shared, body);
            ok("{}")
        }
        Route::Bootstrap => ok_json(&blocks::bootstrap_page(shared)),
        Route::StoredResponse => {
            let below = parts.uri.path().trim_start_matches("/v1/responses/");
            let id = below.trim_end_matches("/cancel");
            error(&ApiError::unknown_response(id))
        }
    };
    Ok(answer)
}

fn text(done: std::result::Result<String, ApiError>) -> Answer {
    match done {
        Ok(text) => typed(
            StatusCode::OK,
            "text/plain; charset=utf-8",
            body::AnswerBody::whole(text),
        ),
        Err(found) => error(&found),
    }
}

fn metrics_page(shared: &Shared) -> Answer {
    let mut text = metrics::render(
        shared.settings.first_model(),
        shared.started.as_secs_f64(),
        &shared.settings.engine(),
        shared.ranks.iter(),
    );
    if shared.models.list().len() > 1 {
        let (running, waiting) = shared.ranks.adapters();
        let now = observe::since_epoch().as_secs_f64();
        let max = shared.settings.max_loras.get();
        text += &metrics::adapters(max, &running, &waiting, now);
    }
    typed(
        StatusCode::OK,
        metrics::CONTENT_TYPE,
        body::AnswerBody::whole(text),
    )
}
