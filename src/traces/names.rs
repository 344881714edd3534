//! Every name in a span. Those of OpenTelemetry's HTTP and GenAI conventions; the latter are still in development, so
//! that they stand here alone. Never the text of a message, a key or a header of the client.

/// The conventions' version.
pub(super) const SCHEMA_URL: &str = "https://opentelemetry.io/schemas/gen-ai/1.42.0";
/// The instrumentation scope.
pub(super) const SCOPE: &str = "warmroute";

// The request: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
pub(super) const HTTP_REQUEST_METHOD: &str = "http.request.method";
pub(super) const HTTP_ROUTE: &str = "http.route";
pub(super) const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
pub(super) const URL_PATH: &str = "url.path";
pub(super) const CLIENT_ADDRESS: &str = "client.address";
pub(super) const SERVER_ADDRESS: &str = "server.address";
pub(super) const SERVER_PORT: &str = "server.port";
pub(super) const ERROR_TYPE: &str = "error.type";

// A try at a worker: https://github.com/open-telemetry/semantic-conventions-genai
pub(super) const OPERATION_NAME: &str = "gen_ai.operation.name";
pub(super) const PROVIDER_NAME: &str = "gen_ai.provider.name";
pub(super) const REQUEST_MODEL: &str = "gen_ai.request.model";
pub(super) const REQUEST_STREAM: &str = "gen_ai.request.stream";
pub(super) const REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
pub(super) const REQUEST_TEMPERATURE: &str = "gen_ai.request.temperature";
pub(super) const RESPONSE_ID: &str = "gen_ai.response.id";
pub(super) const RESPONSE_MODEL: &str = "gen_ai.response.model";
pub(super) const RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// In seconds.
pub(super) const TIME_TO_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
pub(super) const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub(super) const CACHED_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
pub(super) const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
pub(super) const REASONING_TOKENS: &str = "gen_ai.usage.reasoning.output_tokens";
pub(super) const CONVERSATION_ID: &str = "gen_ai.conversation.id";
pub(super) const OPENAI_API_TYPE: &str = "openai.api.type";
/// The wire protocol of all workers; which engine speaks it does not matter to a client.
pub(super) const PROVIDER: &str = "openai";

// Ours.
pub(super) const REQUEST_ID: &str = "warmroute.request.id";
pub(super) const TENANT: &str = "warmroute.tenant";
pub(super) const BACKGROUND_RESPONSE: &str = "warmroute.response.id";
/// The alias that the client asked for.
pub(super) const REQUESTED_MODEL: &str = "warmroute.requested_model";
pub(super) const WORKER: &str = "warmroute.worker";
/// The data-parallel rank of the worker that the request is pinned to.
pub(super) const RANK: &str = "warmroute.dp_rank";
pub(super) const LEG: &str = "warmroute.leg";
pub(super) const ATTEMPT: &str = "warmroute.attempt";
pub(super) const DECISION_REASON: &str = "warmroute.decision.reason";
pub(super) const DECISION_PROMPT_TOKENS: &str = "warmroute.decision.prompt_tokens";
pub(super) const DECISION_CACHED_TOKENS: &str = "warmroute.decision.cached_tokens";
pub(super) const DECISION_NEW_TOKENS: &str = "warmroute.decision.new_tokens";
pub(super) const DECISION_QUEUED_TOKENS: &str = "warmroute.decision.queued_tokens";
pub(super) const DECISION_COST: &str = "warmroute.decision.cost";
/// Of an event: how long what it ends has taken, in seconds.
pub(super) const DURATION: &str = "warmroute.duration";
/// Of an event: tokens of the answer that the client has.
pub(super) const ANSWER_TOKENS: &str = "warmroute.answer_tokens";
pub(super) const PROMPT_TOKENS: &str = "warmroute.prompt_tokens";

// Events.
pub(super) const QUEUE: &str = "warmroute.queue";
pub(super) const TOKENIZE: &str = "warmroute.tokenize";
pub(super) const DECIDE: &str = "warmroute.decide";
pub(super) const PREFILL_LEG: &str = "warmroute.prefill_leg";
pub(super) const KV_TRANSFER: &str = "warmroute.kv_transfer";
pub(super) const CONTINUE: &str = "warmroute.continue";
pub(super) const FIRST_TOKEN: &str = "warmroute.first_token";

// Names of spans without a route or a model.
pub(super) const BACKGROUND_SPAN: &str = "background response";
pub(super) const UNKNOWN_METHOD: &str = "HTTP";
