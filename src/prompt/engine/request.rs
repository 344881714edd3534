//! Which request bodies an engine can return token ids for.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::prompt::types::Api;

/// Whether `/tokenize` returns the same ids for this body as the API itself. `/tokenize` supports messages, tools and
/// template arguments of a chat, and a completion with one text.
pub(super) fn is_supported_by_tokenize(api: Api, body: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Fields<'a> {
        #[serde(borrow)]
        prompt: Option<&'a RawValue>,
        documents: Option<IgnoredAny>,
        reasoning_effort: Option<IgnoredAny>,
        truncate_prompt_tokens: Option<IgnoredAny>,
        suffix: Option<IgnoredAny>,
        prompt_embeds: Option<IgnoredAny>,
        chat_template: Option<IgnoredAny>,
    }
    let Ok(fields) = serde_json::from_slice::<Fields<'_>>(body) else {
        return false;
    };
    let is_plain = fields.truncate_prompt_tokens.is_none();
    match api {
        Api::Chat => {
            is_plain
                && fields.prompt.is_none()
                && fields.documents.is_none()
                && fields.reasoning_effort.is_none()
                && fields.chat_template.is_none()
        }
        Api::Completions => {
            is_plain
                && fields
                    .prompt
                    .is_some_and(|prompt| prompt.get().starts_with('"'))
                && fields.suffix.is_none()
                && fields.prompt_embeds.is_none()
        }
        _ => false,
    }
}

/// Whether a body may contain an image, a sound or a video. A text that contains one of these keys in quotes matches
/// too; then the request is only routed by prediction.
pub(super) fn has_media(body: &[u8]) -> bool {
    const KEYS: [&[u8]; 8] = [
        b"\"image_url\"",
        b"\"input_image\"",
        b"\"image_embeds\"",
        b"\"audio_url\"",
        b"\"input_audio\"",
        b"\"audio_embeds\"",
        b"\"video_url\"",
        b"\"video_embeds\"",
    ];
    let has = |key: &&[u8]| memchr::memmem::find(body, key).is_some();
    KEYS.iter().any(has)
}
