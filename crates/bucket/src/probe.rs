//! Probes the guarantees of a bucket with a scratch object.
//!
//! The only conditional request is create-if-absent, on which the single writer of an epoch
//! depends.

use bytes::Bytes;
use draconis_device::Error;

use crate::api::RequestError;
use crate::retry::RetryingStore;

/// Number of concurrent creations of one key.
const CONCURRENT_CREATES: usize = 4;

/// Writes, creates, lists, reads and deletes a scratch object, as writers will.
///
/// # Errors
/// The guarantee that the bucket lacks, or an error of the bucket.
pub(crate) fn probe_guarantees(bucket: &RetryingStore, token: u128) -> Result<(), Error> {
    let key = format!("probe/{token:032x}");
    let probed = check_create_once(bucket, &key);
    let deleted = bucket.delete(&key);
    probed?;
    deleted.map_err(|trouble| bucket.error("deleting", &key, &trouble))?;
    match bucket.head(&key) {
        Err(RequestError::NotFound) => Ok(()),
        Ok(_) => {
            Err(unsuitable_server_error(bucket, "still has an object after DELETE was answered"))
        }
        Err(trouble) => Err(bucket.error("asking for", &key, &trouble)),
    }
}

fn unsuitable_server_error(bucket: &RetryingStore, what: &str) -> Error {
    let address = &bucket.address;
    Error::Remote(
        format!(
            "{address}: the server {what}; two writers could destroy each other's stores there, so \
             none is made: use a server that does what S3 does"
        )
        .into(),
    )
}

fn check_create_once(bucket: &RetryingStore, key: &str) -> Result<(), Error> {
    let said =
        |doing: &'static str| move |trouble: RequestError| bucket.error(doing, key, &trouble);
    let text = |rival: usize| Bytes::from(format!("probe of rival {rival}"));
    // Several concurrently, then one more: exactly one must win.
    let winners: Vec<usize> = std::thread::scope(|scope| {
        let create = |rival| scope.spawn(move || bucket.create(key, &text(rival)));
        let rivals: Vec<_> = (0..CONCURRENT_CREATES).map(create).collect();
        let answers = rivals.into_iter().enumerate().filter_map(|(rival, thread)| {
            let answer =
                thread.join().unwrap_or(Err(RequestError::Permanent("a thread died".to_owned())));
            match answer {
                Ok(()) => Some(Ok(rival)),
                Err(RequestError::AlreadyExists) => None,
                Err(trouble) => Some(Err(trouble)),
            }
        });
        answers.collect::<Result<_, _>>()
    })
    .map_err(said("writing"))?;
    let is_refused = match bucket.create(key, &Bytes::from_static(b"probe of the last")) {
        Err(RequestError::AlreadyExists) => true,
        Ok(()) => false,
        Err(trouble) => return Err(said("writing")(trouble)),
    };
    let [winner] = winners[..] else {
        return Err(match winners.len() {
            0 => unsuitable_server_error(bucket, "refuses If-None-Match: * where nothing is"),
            many => unsuitable_server_error(
                bucket,
                &format!("let {many} create one object with If-None-Match: *"),
            ),
        });
    };
    if !is_refused {
        return Err(unsuitable_server_error(bucket, "ignores If-None-Match: * on PUT"));
    }
    let all = bucket.list("probe").map_err(said("listing"))?;
    if !all.iter().any(|listed| listed.key == key) {
        return Err(unsuitable_server_error(bucket, "does not list what was written just before"));
    }
    let whole = bucket.get(key, None).map_err(said("reading"))?;
    if whole != text(winner) {
        return Err(unsuitable_server_error(
            bucket,
            "has other bytes than who created the object first wrote",
        ));
    }
    let part = bucket.get(key, Some((6, 2))).map_err(said("reading"))?;
    if part[..] != whole[6..8] {
        return Err(unsuitable_server_error(bucket, "answers a range with other bytes"));
    }
    Ok(())
}
