//! What a chat stream had become when its replica was lost, read back from the events that were stored. Pure.

use super::item::TextItem;
use crate::responses::engine_events::EngineEvents;
use crate::responses::members::{self, Members};
use crate::responses::output_item::PartKind;

/// The beginning of an answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::responses) struct Written {
    /// The message or reasoning item that grows.
    pub(super) open: Option<TextItem>,
    /// Index of the next item.
    pub(super) next: usize,
    /// Bytes of texts.
    pub(super) bytes: usize,
}

impl Written {
    /// Reads the text of events. `None` if they are not those of an answer without calls.
    pub(in crate::responses) fn read(events: &[u8]) -> Option<Self> {
        let mut written = Self::default();
        let mut is_read = true;
        let pushed = EngineEvents::new(usize::MAX).push(events, |event| {
            is_read = written.on_event(&event.data).is_some();
            is_read
        });
        (is_read && pushed.is_ok()).then_some(written)
    }

    fn on_event(&mut self, data: &str) -> Option<()> {
        let event = Members::parse(data).ok()?;
        let kind = event.text("type")?;
        match kind.strip_prefix("response.")? {
            "output_item.added" => {
                let item = Members::parse(event.get("item")?).ok()?;
                let is_reasoning = match &*item.text("type")? {
                    "message" => false,
                    "reasoning" => true,
                    _ => return None,
                };
                if event.get("output_index")?.parse() != Ok(self.next) {
                    return None;
                }
                self.open = Some(TextItem::opened(self.next, is_reasoning));
                self.next += 1;
            }
            "output_item.done" => self.open = None,
            "content_part.added" => {
                let part = Members::parse(event.get("part")?).ok()?;
                let kind = PartKind::parse(&part.text("type")?)?;
                self.open.as_mut()?.on_part(kind);
            }
            delta if delta.ends_with(".delta") => {
                let text = members::escaped(event.get("delta")?)?;
                let logprobs = event.get("logprobs").unwrap_or("[]");
                let logprobs = logprobs.strip_prefix('[')?.strip_suffix(']')?;
                self.open.as_mut()?.on_text(text, logprobs)?;
                self.bytes += text.len() + logprobs.len();
            }
            _ => {}
        }
        Some(())
    }
}
