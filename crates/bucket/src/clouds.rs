//! Cloud buckets: S3 and compatible ones, Google Cloud Storage, Azure.

mod credentials;
mod profile;
mod s3;

use std::sync::Arc;
use std::time::Duration;

use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{ClientOptions, Error, ObjectStore, RetryConfig};
use tokio::runtime::Handle;

/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the bucket of that name, of `s3`, `gs` or `az`, with the credentials of the provider's
/// own tools.
pub(crate) fn open_cloud_store(
    scheme: &str,
    bucket: &str,
    address: &str,
    timeout: Duration,
    runtime: &Handle,
) -> Result<Arc<dyn ObjectStore>, String> {
    let describe = |error: Error| format!("{address}: {error}");
    // TLS needs a process-wide provider of ciphers; this fails if there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let request = REQUEST_TIMEOUT.min(timeout.max(Duration::from_secs(1)));
    let client = ClientOptions::new()
        .with_timeout(request)
        .with_connect_timeout(CONNECT_TIMEOUT.min(request));
    let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
    Ok(match scheme {
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
            let builder = builder.with_client_options(client).with_retry(once);
            Arc::new(builder.build().map_err(describe)?)
        }
        "az" => {
            let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
            let builder = builder.with_client_options(client).with_retry(once);
            Arc::new(builder.build().map_err(describe)?)
        }
        _ => {
            let bucket = s3::open_s3_bucket(bucket, client, once, request, runtime);
            Arc::new(bucket.map_err(|why| format!("{address}: {why}"))?)
        }
    })
}
