//! Notices to owners, one stream each: how an owner learns that a response which it runs was cancelled or deleted.

use super::client::Redis;
use super::keys::{member, parse_member};
use super::reply::{Reply, malformed};
use super::request::{Kind, Request};
use crate::store::cancel::{NOTICES_MAX, NoticeKind};
use crate::store::{Error, Notice, NoticeCursor, Owner, ResponseKey};

/// Notices expire after this time: an owner that reads none for so long has stopped.
const NOTICES_TTL_S: u64 = 3_600;

impl Redis {
    /// Sends a notice to an owner. Without it the owner learns of the change half a second later.
    pub(super) async fn notify(&self, owner: Owner, key: ResponseKey, kind: NoticeKind) {
        let notices = self.keys.notices(owner);
        let max = ("MAXLEN", "~", NOTICES_MAX);
        let fields = ("k", member(key), "w", kind.as_str());
        let add = Request::command("XADD", (&notices, max, "*", fields));
        if self.execute(Kind::Write, add).await.is_ok() {
            self.send_detached(Request::command("EXPIRE", (notices, NOTICES_TTL_S)));
        }
    }

    pub(super) async fn read_notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> Result<(Vec<Notice>, NoticeCursor), Error> {
        let from = format!("({}-{}", after.0, after.1);
        let range = (self.keys.notices(owner), from, "+", "COUNT", NOTICES_MAX);
        let range = Request::command("XRANGE", range);
        let mut reply = Reply::new(self.execute(Kind::Read, range).await?)?;
        let (mut notices, mut cursor) = (Vec::new(), after);
        while !reply.is_empty() {
            let mut entry = Reply::new(reply.value())?;
            let id = entry.word()?;
            let (ms, number) = id
                .split_once('-')
                .ok_or_else(|| malformed("invalid stream id"))?;
            let number_of = |text: &str| text.parse().map_err(|_| malformed("invalid stream id"));
            cursor = NoticeCursor(number_of(ms)?, number_of(number)?);
            let mut fields = Reply::new(entry.value())?;
            let (_, key, _, kind) = (
                fields.word()?,
                fields.word()?,
                fields.word()?,
                fields.word()?,
            );
            let mut kinds = NoticeKind::ALL.into_iter();
            let Some(kind) = kinds.find(|known| known.as_str() == kind) else {
                // From a newer release; the owner learns of it from `check_ownership`.
                continue;
            };
            let at_ms = cursor.0;
            notices.extend(parse_member(&key).map(|key| Notice { key, kind, at_ms }));
        }
        Ok((notices, cursor))
    }
}
