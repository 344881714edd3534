//! Where the parts of batches lie in the storage. Pure.

use super::batch::BatchRecord;
use super::file;
use super::line::Flavor;
use crate::ids::{self, Tenant};

/// What the record of a batch of Messages has in place of a file's id: such a batch has no files, and its input and
/// results lie among what goes with it.
pub(super) const OWN_INPUT: &str = "input.jsonl";
pub(super) const OWN_RESULTS: &str = "results.jsonl";
/// In place of the results of such a batch that has failed as a whole. It is another object: a replica that has lost
/// the batch may write it at any time.
pub(super) const OWN_ERRORS: &str = "errors.jsonl";

const SHARDS: &str = "shards.json";
const PARTS: &str = "parts";

/// All that goes with a batch.
pub(super) fn folder(batch: &str) -> String {
    format!("batches/{batch}/")
}

/// The list of its shards.
pub(super) fn shards(batch: &str) -> String {
    format!("batches/{batch}/{SHARDS}")
}

/// The results of lines, until they are put together.
pub(super) fn parts(batch: &str) -> String {
    format!("batches/{batch}/{PARTS}/")
}

/// The parts of one shard: who runs it lists no others.
pub(super) fn shard_parts(batch: &str, shard: u32) -> String {
    format!("batches/{batch}/{PARTS}/{shard:06}/")
}

/// The `number`th part that a writer writes of a shard.
pub(super) fn part(batch: &str, shard: u32, writer: u64, number: u32) -> String {
    format!("batches/{batch}/{PARTS}/{shard:06}/{writer:016x}-{number:06}.jsonl")
}

/// An object of a batch of Messages: [`OWN_INPUT`], [`OWN_RESULTS`] or [`OWN_ERRORS`].
pub(super) fn own(batch: &str, name: &str) -> String {
    format!("batches/{batch}/{name}")
}

/// The input of a batch. `None` if its record names no file.
pub(super) fn input(tenant: Tenant, record: &BatchRecord) -> Option<String> {
    match record.flavor {
        Flavor::OpenAi => file::storage_path(tenant, &record.input_file_id),
        Flavor::Messages => Some(own(&record.id, OWN_INPUT)),
    }
}

/// Whether a path is one that an object of this router could have.
pub(super) fn is_object(path: &str) -> bool {
    let mut parts = path.split('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some("files"), Some(tenant), Some(id)) => {
            let is_digit = |digit: u8| digit.is_ascii_hexdigit();
            let is_tenant = tenant.len() == 16 && tenant.bytes().all(is_digit);
            is_tenant && file::is_file_id(id) && parts.next().is_none()
        }
        (Some("batches"), Some(id), Some(name)) => {
            let is_batch = |flavor| is_batch_id(flavor, id);
            let is_own = [SHARDS, PARTS, OWN_INPUT, OWN_RESULTS, OWN_ERRORS].contains(&name);
            is_own && (is_batch(Flavor::OpenAi) || is_batch(Flavor::Messages))
        }
        _ => false,
    }
}

/// Whether a text is an id that a batch of this router could have. Any other text is no part of a path or a key.
pub(super) fn is_batch_id(flavor: Flavor, text: &str) -> bool {
    let prefix = match flavor {
        Flavor::OpenAi => "batch_",
        Flavor::Messages => "msgbatch_",
    };
    text.strip_prefix(prefix)
        .is_some_and(|digits| ids::is_hex(digits, 32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::batch::new_batch_id;

    #[test]
    fn only_ids_of_batches_are_part_of_paths() {
        for flavor in [Flavor::OpenAi, Flavor::Messages] {
            let id = new_batch_id(flavor, 7 << 90);
            assert!(is_batch_id(flavor, &id));
            assert!(!is_batch_id(flavor, &id.to_uppercase()));
            assert!(!is_batch_id(flavor, &format!("{id}0")));
        }
        for text in ["", "batch_", "batch_../../x", "file-0"] {
            assert!(!is_batch_id(Flavor::OpenAi, text), "{text}");
        }
        assert!(!is_batch_id(
            Flavor::Messages,
            &new_batch_id(Flavor::OpenAi, 1)
        ));
    }

    #[test]
    fn objects_are_known_by_their_paths() {
        let id = new_batch_id(Flavor::Messages, 7 << 90);
        let file = file::storage_path(Tenant::default(), &file::new_file_id(7)).unwrap();
        let paths = [
            file,
            shards(&id),
            part(&id, 1, 2, 3),
            own(&id, OWN_INPUT),
            own(&id, OWN_RESULTS),
            own(&id, OWN_ERRORS),
        ];
        for path in paths {
            assert!(is_object(&path), "{path}");
        }
        for path in [
            "",
            "trial",
            "files/a",
            "batches/b/shards.json",
            "batches",
            &folder(&id),
        ] {
            assert!(!is_object(path), "{path}");
        }
    }

    #[test]
    fn each_shard_has_a_folder_for_its_parts() {
        let of = |shard, number| part("b", shard, 0xab, number);
        assert!(of(10, 0) < of(10, 1));
        assert!(of(10, 1).starts_with(&shard_parts("b", 10)));
        assert!(!of(1, 10).starts_with(&shard_parts("b", 10)));
        assert!(shard_parts("b", 10).starts_with(&parts("b")));
    }
}
