//! Next steps for refusals, by the words of the server.

/// Words of a refusal, and what to do. The first that matches counts.
const STEPS: &[(&[&str], &str)] = &[
    (
        &["RequestTimeTooSkewed"],
        "; the clock of this machine differs from that of the server: set it",
    ),
    (
        &["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity"],
        "; the access key or its secret is wrong: see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the \
         profile",
    ),
    (
        &["ExpiredToken", "InvalidToken", "TokenRefreshRequired"],
        "; the credentials are not valid any more: get new ones",
    ),
    (
        &["NoSuchBucket", "InvalidBucketName", "404 Not Found"],
        "; see the name of the bucket, and the endpoint (AWS_ENDPOINT_URL)",
    ),
    (&["401 "], "; the server does not accept the credentials: see the access key and its secret"),
    (
        &["AccessDenied", "AllAccessDisabled", "403 "],
        "; the access key has no permission for this: see the policies of the key and of the bucket",
    ),
];

/// Returns the next step for a refusal with this text, if it has one.
pub(crate) fn step_for_refusal(text: &str) -> Option<&'static str> {
    let is_meant = |words: &&[&str]| words.iter().any(|word| text.contains(word));
    STEPS.iter().find(|(words, _)| is_meant(words)).map(|(_, step)| *step)
}

/// Returns the next step after requests whose last error is `why` were tried until the deadline.
pub(crate) fn step_after_retries(why: &str) -> &'static str {
    step_for_refusal(why).unwrap_or(
        "; it was tried again and again: see that the bucket answers, or allow it more time with \
         --deadline",
    )
}

#[cfg(test)]
mod tests {
    use super::step_for_refusal;

    #[test]
    fn refusals_name_their_cause() {
        for (text, word) in [
            ("403 RequestTimeTooSkewed: The difference is too large", "the clock"),
            ("403 SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
            ("403 InvalidAccessKeyId: no such key", "AWS_ACCESS_KEY_ID"),
            ("403 AccessDenied: Access Denied", "permission"),
            ("status code: 403 Forbidden: ", "permission"),
            ("status code: 401 Unauthorized: ", "credentials"),
            ("404 NoSuchBucket: it does not exist", "name of the bucket"),
            ("400 ExpiredToken: too old", "get new ones"),
        ] {
            assert!(step_for_refusal(text).unwrap().contains(word), "{text}");
        }
        for text in ["503 SlowDown: reduce your rate", "connection refused", "operation timed out"]
        {
            assert_eq!(step_for_refusal(text), None, "{text}");
        }
    }
}
