//! Turns a request body into the token ids that its engine will compute: renders the prompt, looks up its pieces in the
//! cache, and tokenizes the others.
//!
//! There are two steps, so that the caller can choose a thread for the second. `prepare` costs about as much as reading
//! the body; `Prepared::finish` costs at most 0.2 ms per kilobyte of text that is not cached.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use prometheus::IntCounter;

use super::cache::{Cache, VocabularyId};
use super::render::{RenderedPrompt, RenderedText, Renderer, TokenizeError};
use super::types::Api;
use super::vocabulary::Vocabulary;
use crate::observe::metrics::Registry;

/// A prompt with a longer rendered text is routed by prediction. 16 MiB are four million tokens.
const MAX_TEXT: usize = 16 << 20;
/// New text up to this length is tokenised on the request's I/O thread, in a millisecond or two; longer text on a thread of the
/// pool. Each thread that tokenises grows caches of about 100 MB.
const MAX_INLINE_TEXT: usize = 16 << 10;
/// A longer request body goes to the pool as a whole. As long as the text's: 64,000 tokens that are known but for their end.
pub const MAX_INLINE_BODY: usize = 256 << 10;

#[derive(Clone, Debug)]
pub struct Metrics {
    complete: IntCounter,
    partial: IntCounter,
    /// In the order of `TokenizeError::REASONS`.
    errors: [IntCounter; TokenizeError::REASONS.len()],
}

impl Metrics {
    pub fn new(registry: &Registry) -> Self {
        let prompts = registry.counters(
            "warmroute_tokenizer_prompts_total",
            "Prompts by tokenization outcome: complete, partial (up to an image), or the reason for none.",
            &["outcome"],
        );
        let counter = |outcome| prompts.with_label_values(&[outcome]);
        Self {
            complete: counter("complete"),
            partial: counter("partial"),
            errors: TokenizeError::REASONS.map(counter),
        }
    }

    fn count_error(&self, error: &TokenizeError) {
        let mut reasons = TokenizeError::REASONS.iter().zip(&self.errors);
        if let Some((_, counter)) = reasons.find(|(reason, _)| **reason == error.reason()) {
            counter.inc();
        }
    }
}

/// The token ids that the engine will compute for a prompt, up to the first image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenizedPrompt {
    pub ids: Vec<u32>,
    /// Bytes of text from the first image on. Their ids depend on what the engine inserts for the image.
    pub untokenized_bytes: usize,
}

/// Tokenizes the prompts of one model.
#[derive(Debug)]
pub struct Tokenizer {
    renderer: Renderer,
    vocabulary: Vocabulary,
    id: VocabularyId,
    cache: Arc<Cache>,
    /// A longer text is not tokenized.
    max_text: usize,
    metrics: Metrics,
}

/// A rendered prompt after the look-up of its pieces in the cache.
#[derive(Debug)]
pub struct Prepared {
    tokenizer: Arc<Tokenizer>,
    text: RenderedText,
    /// Ids of the cached pieces, in order.
    ids: Vec<u32>,
    uncached: Vec<UncachedPiece>,
    /// Bytes of text that `finish` will tokenize.
    uncached_bytes: usize,
    untokenized_bytes: usize,
}

/// A piece that must be tokenized: the bytes `start..end` of the text, after `ids_before` of the cached ids.
#[derive(Debug)]
struct UncachedPiece {
    start: usize,
    end: usize,
    ids_before: usize,
}

impl Tokenizer {
    pub fn new(
        renderer: Renderer,
        vocabulary: Vocabulary,
        cache: Arc<Cache>,
        metrics: Metrics,
    ) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self {
            renderer,
            vocabulary,
            id: VocabularyId(NEXT.fetch_add(1, Relaxed)),
            cache,
            max_text: MAX_TEXT,
            metrics,
        }
    }

    /// Both steps at once. `now_s` is the time in seconds since 1970, for templates that print the date.
    pub fn tokens(
        self: &Arc<Self>,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<TokenizedPrompt, TokenizeError> {
        self.prepare(api, body, now_s)?.finish()
    }

    /// Renders the prompt and looks up its pieces. `now_s` as in `tokens`.
    pub fn prepare(
        self: &Arc<Self>,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<Prepared, TokenizeError> {
        self.look_up(api, body, now_s)
            .inspect_err(|error| self.metrics.count_error(error))
    }

    /// The text that would be tokenized.
    pub fn render(
        &self,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<RenderedPrompt, TokenizeError> {
        self.renderer.render(api, body, now_s)
    }

    pub fn refuses_later_system(&self) -> bool {
        self.renderer.refuses_later_system()
    }

    /// The text of token ids, for messages about a tokenizer mismatch.
    pub fn text(&self, ids: &[u32]) -> Option<String> {
        self.vocabulary.decode(ids)
    }

    fn look_up(
        self: &Arc<Self>,
        api: Api,
        body: &[u8],
        now_s: i64,
    ) -> Result<Prepared, TokenizeError> {
        let mut prepared = Prepared {
            tokenizer: self.clone(),
            text: RenderedText::default(),
            ids: Vec::new(),
            uncached: Vec::new(),
            uncached_bytes: 0,
            untokenized_bytes: 0,
        };
        match self.renderer.render(api, body, now_s)? {
            RenderedPrompt::Ids(ids) => prepared.ids = ids,
            RenderedPrompt::Text(text) if text.text.len() > self.max_text => {
                let bytes = text.text.len();
                return Err(TokenizeError::TooLong { bytes });
            }
            RenderedPrompt::Text(text) => {
                prepared.text = text;
                if self.vocabulary.lacks_first_space(&prepared.text.text) {
                    prepared.text.text.insert(0, ' ');
                    prepared.text.known_bytes += 1;
                }
                prepared.look_up_pieces();
            }
        }
        Ok(prepared)
    }

    /// Tokenizes one piece and caches its ids.
    fn encode(&self, piece: &str, ids: &mut Vec<u32>) -> Result<(), TokenizeError> {
        let start = ids.len();
        self.vocabulary
            .encode(piece, ids)
            .map_err(TokenizeError::Tokenizer)?;
        self.cache.put(self.id, piece, &ids[start..]);
        Ok(())
    }
}

impl Prepared {
    /// Whether `finish` would take too long on an I/O thread.
    pub fn is_long(&self) -> bool {
        self.uncached_bytes > MAX_INLINE_TEXT
    }

    /// Whether `finish` would take too long if none of the pieces were cached.
    pub fn may_be_long(&self) -> bool {
        self.text.text.len() > MAX_INLINE_TEXT
    }

    /// Tokenizes the pieces that are not cached.
    pub fn finish(mut self) -> Result<TokenizedPrompt, TokenizeError> {
        let ids = self.encode_uncached();
        let metrics = &self.tokenizer.metrics;
        match &ids {
            Ok(_) if self.untokenized_bytes == 0 => metrics.complete.inc(),
            Ok(_) => metrics.partial.inc(),
            Err(error) => metrics.count_error(error),
        }
        Ok(TokenizedPrompt {
            ids: ids?,
            untokenized_bytes: self.untokenized_bytes,
        })
    }

    fn look_up_pieces(&mut self) {
        let tokenizer = &self.tokenizer;
        let text = self.text.text.as_str();
        // A token is about four bytes. Reserving a third instead avoids a reallocation.
        self.ids.reserve(text.len() / 3);
        if self.text.add_special_tokens {
            self.ids.extend_from_slice(tokenizer.vocabulary.bos_eos().0);
        }
        let mut start = 0;
        for piece in tokenizer.vocabulary.pieces(text) {
            let end = start + piece.len();
            if !self.is_before_media(end) {
                self.untokenized_bytes = text.len() - start;
                return;
            }
            if !tokenizer.cache.get(tokenizer.id, piece, &mut self.ids) {
                self.uncached.push(UncachedPiece {
                    start,
                    end,
                    ids_before: self.ids.len(),
                });
                self.uncached_bytes += piece.len();
            }
            start = end;
        }
    }

    /// Whether a piece ends at `end` no matter what the engine inserts for an image. That text could begin with the rest
    /// of an added token, so the last bytes before the image are uncertain.
    fn is_before_media(&self, end: usize) -> bool {
        let RenderedText {
            text, known_bytes, ..
        } = &self.text;
        *known_bytes == text.len()
            || end + self.tokenizer.vocabulary.max_token_bytes() <= *known_bytes
    }

    fn encode_uncached(&mut self) -> Result<Vec<u32>, TokenizeError> {
        let tokenizer = &self.tokenizer;
        let cached = std::mem::take(&mut self.ids);
        let (mut ids, cached) = match self.uncached.first() {
            Some(piece) if piece.ids_before < cached.len() => {
                let capacity = cached.len() + self.uncached_bytes / 3 + 8;
                (Vec::with_capacity(capacity), cached)
            }
            // All cached pieces come first, as in the next turn of a conversation.
            _ => (cached, Vec::new()),
        };
        let mut copied = 0;
        for piece in &self.uncached {
            if let Some(before) = cached.get(copied..piece.ids_before) {
                ids.extend_from_slice(before);
                copied = piece.ids_before;
            }
            tokenizer.encode(&self.text.text[piece.start..piece.end], &mut ids)?;
        }
        ids.extend_from_slice(cached.get(copied..).unwrap_or_default());
        if self.text.add_special_tokens && self.untokenized_bytes == 0 {
            ids.extend_from_slice(tokenizer.vocabulary.bos_eos().1);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests;
