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
        let mut add = redis::cmd("XADD");
        add.arg(&notices)
            .arg("MAXLEN")
            .arg("~")
            .arg(NOTICES_MAX)
            .arg("*")
            .arg("k")
            .arg(member(key))
            .arg("w")
            .arg(kind.as_str());
        if self
            .execute(Kind::Write, Request::Command(add))
            .await
            .is_ok()
        {
            let mut expire = redis::cmd("EXPIRE");
            expire.arg(notices).arg(NOTICES_TTL_S);
            self.send_detached(Request::Command(expire));
        }
    }

    pub(super) async fn read_notices(
        &self,
        owner: Owner,
        after: NoticeCursor,
    ) -> Result<(Vec<Notice>, NoticeCursor), Error> {
        let mut range = redis::cmd("XRANGE");
        range
            .arg(self.keys.notices(owner))
            .arg(format!("({}-{}", after.0, after.1))
            .arg("+")
            .arg("COUNT")
            .arg(NOTICES_MAX);
        let mut reply = Reply::new(self.execute(Kind::Read, Request::Command(range)).await?)?;
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
