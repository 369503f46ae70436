//! Buckets of clouds: S3 and what speaks like it, Google's, Azure's.

mod credentials;
mod profile;
mod s3;

use std::sync::Arc;
use std::time::Duration;

use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, Error, ObjectStore, RetryConfig};
use tokio::runtime::Handle;

/// How long one request may take before it counts as lost.
const REQUEST: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(5);

/// The bucket of that name, of `s3`, `gs` or `az`, with credentials from where the kind's own tools
/// have them.
pub(crate) fn store(
    scheme: &str,
    bucket: &str,
    address: &str,
    timeout: Duration,
    runtime: &Handle,
) -> Result<Arc<dyn ObjectStore>, String> {
    let said = |error: Error| format!("{address}: {error}");
    // What speaks TLS wants to be told whose ciphers; it was told already if this fails.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let request = REQUEST.min(timeout.max(Duration::from_secs(1)));
    let client =
        ClientOptions::new().with_timeout(request).with_connect_timeout(CONNECT.min(request));
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    Ok(match scheme {
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            let builder = builder.with_client_options(client).with_retry(once);
            Arc::new(builder.build().map_err(said)?)
        }
        "az" => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
            let builder = builder.with_client_options(client).with_retry(once);
            Arc::new(builder.build().map_err(said)?)
        }
        _ => {
            let bucket = s3::bucket(bucket, client, once, request, runtime);
            Arc::new(bucket.map_err(|why| format!("{address}: {why}"))?)
        }
    })
}
