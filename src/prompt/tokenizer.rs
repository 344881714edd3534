//! Turns a request body into the token ids that its engine will compute: renders it, looks pieces up in the cache,
//! tokenizes the rest.
//!
//! Two steps, so that the caller can choose the thread of the second one: `prepare` costs about as much as reading
//! the body, `Prepared::finish` at most 0.2 ms per kilobyte of new text.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use prometheus::IntCounter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Api;
use super::cache::{Cache, VocabularyId};
use super::render::{Prompt, Renderer, Text, Unknown};
use super::vocabulary::Vocabulary;
use crate::observe::metrics::Registry;
use crate::units::SizeText;

/// Which texts are tokenised, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A prompt with a longer rendered text is routed by prediction. 16 MiB are four million tokens.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "0"))]
    pub max_text: usize,
    /// New text up to this length is tokenised on the request's I/O thread, in a millisecond or two; longer text
    /// on a thread of the pool. Each thread that tokenises grows caches of about 100 MB; with 0 only the pool's do.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "0"))]
    pub max_inline_text: usize,
    /// A longer request body goes to the pool as a whole.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "0"))]
    pub max_inline_body: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_text: 16 << 20,
            max_inline_text: 16 << 10,
            // As long as the text's: 64,000 tokens that are known but for their end.
            max_inline_body: 256 << 10,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Metrics {
    whole: IntCounter,
    part: IntCounter,
    unknown: [IntCounter; Unknown::REASONS.len()],
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let prompts = registry.counters(
            "warmroute_tokenizer_prompts_total",
            "Prompts by tokenization outcome: complete, partial (up to an image), or the reason for none.",
            &["outcome"],
        );
        let of = |outcome| prompts.with_label_values(&[outcome]);
        Self {
            whole: of("complete"),
            part: of("partial"),
            unknown: Unknown::REASONS.map(of),
        }
    }

    fn count_unknown(&self, unknown: &Unknown) {
        let found = Unknown::REASONS.iter().zip(&self.unknown);
        for (_, counter) in found.filter(|(reason, _)| **reason == unknown.reason()) {
            counter.inc();
        }
    }
}

/// A prompt's ids, as its engine will have them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    pub ids: Vec<u32>,
    /// Bytes of text that come after them and whose ids are not known here, since an image is before.
    pub unknown_bytes: usize,
}

impl Tokens {
    /// Whether the prompt goes on after them: only its blocks before an image are known.
    pub fn ends_early(&self) -> bool {
        self.unknown_bytes > 0
    }
}

/// Shared by all requests of a model.
#[derive(Debug)]
pub struct Tokenizer {
    renderer: Renderer,
    vocabulary: Vocabulary,
    id: VocabularyId,
    cache: Arc<Cache>,
    settings: Settings,
    metrics: Metrics,
}

/// A rendered prompt whose known pieces are found.
#[derive(Debug)]
pub struct Prepared {
    tokenizer: Arc<Tokenizer>,
    text: Text,
    /// Ids of what is known, one piece after the other.
    ids: Vec<u32>,
    new: Vec<New>,
    new_bytes: usize,
    unknown_bytes: usize,
}

/// A piece that is yet to be tokenised, and how many of the known ids are before it.
#[derive(Debug)]
struct New {
    from: usize,
    to: usize,
    after: usize,
}

impl Tokenizer {
    pub fn new(
        renderer: Renderer,
        vocabulary: Vocabulary,
        cache: Arc<Cache>,
        settings: Settings,
        metrics: Metrics,
    ) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self {
            renderer,
            vocabulary,
            id: VocabularyId(NEXT.fetch_add(1, Relaxed)),
            cache,
            settings,
            metrics,
        }
    }

    /// All at once. `now_s` is the time in seconds since 1970, for templates that say the date.
    pub fn tokens(self: &Arc<Self>, api: Api, body: &[u8], now_s: i64) -> Result<Tokens, Unknown> {
        self.prepare(api, body, now_s)?.finish()
    }

    pub fn prepare(
        self: &Arc<Self>,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<Prepared, Unknown> {
        self.find_known(api, body, now_s)
            .inspect_err(|unknown| self.metrics.count_unknown(unknown))
    }

    /// Whether what `prepare` left is too much for the thread that serves requests.
    pub fn is_long(&self, prepared: &Prepared) -> bool {
        prepared.new_bytes() > self.settings.max_inline_text
    }

    /// Whether `prepare` itself is.
    pub fn is_long_body(&self, body: &[u8]) -> bool {
        body.len() > self.settings.max_inline_body
    }

    /// The text that would be tokenised, for those who look into a disagreement.
    pub fn render(&self, api: Api, body: &[u8], now_s: i64) -> Result<Prompt, Unknown> {
        self.renderer.render(api, body, now_s)
    }

    /// The text of some ids, for the same.
    pub fn text(&self, ids: &[u32]) -> Option<String> {
        self.vocabulary.decode(ids)
    }

    fn find_known(
        self: &Arc<Self>,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<Prepared, Unknown> {
        let mut prepared = Prepared {
            tokenizer: self.clone(),
            text: Text::default(),
            ids: Vec::new(),
            new: Vec::new(),
            new_bytes: 0,
            unknown_bytes: 0,
        };
        match self.renderer.render(api, body, now_s)? {
            Prompt::Ids(ids) => prepared.ids = ids,
            Prompt::Text(text) if text.text.len() > self.settings.max_text => {
                let bytes = text.text.len();
                return Err(Unknown::TooLong { bytes });
            }
            Prompt::Text(text) => {
                prepared.text = text;
                prepared.find_known();
            }
        }
        Ok(prepared)
    }

    /// The ids of one piece.
    fn encode(&self, piece: &str, ids: &mut Vec<u32>) -> Result<(), Unknown> {
        let start = ids.len();
        self.vocabulary
            .encode(piece, ids)
            .map_err(Unknown::Tokenizer)?;
        self.cache.put(self.id, piece, &ids[start..]);
        Ok(())
    }
}

impl Prepared {
    /// Bytes of text that `finish` will tokenise.
    pub fn new_bytes(&self) -> usize {
        self.new_bytes
    }

    pub fn finish(mut self) -> Result<Tokens, Unknown> {
        let ids = self.encode_new();
        let metrics = &self.tokenizer.metrics;
        match &ids {
            Ok(_) if self.unknown_bytes == 0 => metrics.whole.inc(),
            Ok(_) => metrics.part.inc(),
            Err(unknown) => metrics.count_unknown(unknown),
        }
        Ok(Tokens {
            ids: ids?,
            unknown_bytes: self.unknown_bytes,
        })
    }

    fn find_known(&mut self) {
        let tokenizer = &self.tokenizer;
        let text = self.text.text.as_str();
        // Four bytes a token are the rule, and a longer vector costs less than moving it.
        self.ids.reserve(text.len() / 3);
        if self.text.add_special_tokens {
            self.ids.extend_from_slice(tokenizer.vocabulary.bos_eos().0);
        }
        let mut from = 0;
        for piece in tokenizer.vocabulary.pieces(text) {
            let to = from + piece.len();
            if !self.is_sure(to) {
                self.unknown_bytes = text.len() - from;
                return;
            }
            if !tokenizer.cache.get(tokenizer.id, piece, &mut self.ids) {
                let after = self.ids.len();
                self.new.push(New { from, to, after });
                self.new_bytes += piece.len();
            }
            from = to;
        }
    }

    /// Whether a piece that ends there would end there whatever comes in the place of an image.
    fn is_sure(&self, end: usize) -> bool {
        let Text {
            text, known_bytes, ..
        } = &self.text;
        *known_bytes == text.len()
            || end + self.tokenizer.vocabulary.token_bytes_max() <= *known_bytes
    }

    fn encode_new(&mut self) -> Result<Vec<u32>, Unknown> {
        let tokenizer = &self.tokenizer;
        let known = std::mem::take(&mut self.ids);
        let (mut ids, known) = match self.new.first() {
            Some(new) if new.after < known.len() => {
                let capacity = known.len() + self.new_bytes / 3 + 8;
                (Vec::with_capacity(capacity), known)
            }
            // All that is new comes after all that is known, as in a conversation's next turn.
            _ => (known, Vec::new()),
        };
        let mut done = 0;
        for new in &self.new {
            if let Some(before) = known.get(done..new.after) {
                ids.extend_from_slice(before);
                done = new.after;
            }
            tokenizer.encode(&self.text.text[new.from..new.to], &mut ids)?;
        }
        ids.extend_from_slice(known.get(done..).unwrap_or_default());
        if self.text.add_special_tokens && self.unknown_bytes == 0 {
            ids.extend_from_slice(tokenizer.vocabulary.bos_eos().1);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests;
