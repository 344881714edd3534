//! vLLM's `MooncakeConnector`: both legs carry one id, which the router makes, and the decode leg says
//! where the prefill worker is met. The prefill leg's answer says nothing of it.

use super::{Answer, Dialect, Told, Transfer, Unhanded, quoted};

#[derive(Debug)]
pub(super) struct Mooncake;

impl Dialect for Mooncake {
    fn ask(&self, transfer: &Transfer) -> String {
        let id = quoted(&transfer.id);
        format!(r#""do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{id}"#)
    }

    /// A prefill leg that ends at its first token for another reason than its length drops its blocks, and
    /// the decode leg waits for them for minutes.
    fn also(&self) -> &'static str {
        r#","ignore_eos":true"#
    }

    fn read(&self, transfer: &Transfer, answer: &Answer<'_>) -> Result<Told, Unhanded> {
        if !answer.has_its_token() {
            return Err(Unhanded::Stopped);
        }
        let peer = transfer.peer.as_ref().ok_or(Unhanded::NoPeer)?;
        let engine = peer.engine(transfer.rank).ok_or(Unhanded::NoPeer)?;
        let (bootstrap, engine, id) = (
            quoted(&peer.bootstrap),
            quoted(engine),
            quoted(&transfer.id),
        );
        Ok(Told {
            fields: format!(
                r#""do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":{bootstrap},"remote_engine_id":{engine},"transfer_id":{id}"#
            ),
            cached_tokens: 0,
        })
    }
}
