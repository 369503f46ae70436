//! S3 buckets, with the settings and credentials of AWS tools.
//!
//! ```text
//!   variables ─▶ web identity ─▶ profile in ~/.aws ─▶ container ─▶ instance
//! ```

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey as Key};
use object_store::{ClientOptions, RetryConfig};
use tokio::runtime::Handle;

use super::credentials::{CredentialOrigin, Credentials, profile_keys};
use super::profile::{Environment, Profile, config_paths, display_path};

/// Timeout of an instance's metadata service, which is local.
const METADATA_TIMEOUT: Duration = Duration::from_millis(800);
/// Its address.
const METADATA_URL: &str = "http://169.254.169.254";

/// Location of the credentials of a bucket.
enum CredentialSource {
    /// The builder has them, or needs none.
    Given,
    Elsewhere(CredentialOrigin),
    /// An instance may have them.
    Unknown,
}

/// Returns the bucket of that name.
pub(super) fn open_s3_bucket(
    bucket: &str,
    client: ClientOptions,
    retry: RetryConfig,
    timeout: Duration,
    runtime: &Handle,
) -> Result<AmazonS3, String> {
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(_, value)| !value.is_empty());
    let environment: Environment = environment.collect();
    let mut builder = builder_from_environment(&environment);
    let has = |key| builder.get_config_value(&key).is_some();
    let has_keys = has(Key::AccessKeyId) || has(Key::SecretAccessKey);
    let profile = match Profile::read(&environment) {
        Ok(profile) => profile,
        // Explicit keys need no files.
        Err(why) if has_keys => {
            log::debug!("{why}");
            Profile::default()
        }
        Err(why) => return Err(why),
    };
    if !has(Key::Region)
        && let Some(region) = profile.get("region")
    {
        builder = builder.with_region(region);
    }
    if let Some(endpoint) = endpoint_url(&environment, &profile, "s3") {
        builder = builder.with_endpoint(&endpoint);
    }
    let found = find_credentials(&environment, &builder, &profile)?;
    let is_unknown = matches!(found, CredentialSource::Unknown);
    if let CredentialSource::Elsewhere(source) = found {
        builder = builder.with_credentials(Arc::new(Credentials::new(source, timeout)?));
    }
    let endpoint = builder.get_config_value(&Key::S3Endpoint);
    let endpoint = endpoint.or_else(|| builder.get_config_value(&Key::Endpoint));
    // An endpoint without TLS is used as given.
    let is_plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    let builder = builder.with_client_options(client.with_allow_http(is_plain)).with_retry(retry);
    let built = builder.with_bucket_name(bucket).build().map_err(|error| error.to_string())?;
    if is_unknown {
        check_instance_credentials(&built, &environment, runtime)?;
    }
    Ok(built)
}

fn builder_from_environment(environment: &Environment) -> AmazonS3Builder {
    let settings = environment.iter().filter(|(name, _)| {
        let is_endpoint = name.starts_with("AWS_ENDPOINT_URL");
        name.starts_with("AWS_") && !(is_endpoint && ignores_endpoints(environment))
    });
    let mut builder = AmazonS3Builder::new();
    for (name, value) in settings {
        if let Ok(key) = name.to_ascii_lowercase().parse() {
            builder = builder.with_config(key, value);
        }
    }
    match environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") {
        Some(endpoint) => builder.with_metadata_endpoint(endpoint.trim_end_matches('/')),
        None => builder,
    }
}

fn is_variable_true(environment: &Environment, name: &str) -> bool {
    environment.get(name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

fn ignores_endpoints(environment: &Environment) -> bool {
    is_variable_true(environment, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
}

/// Returns the address of a service: settings of the service first, then those of the environment.
fn endpoint_url(environment: &Environment, profile: &Profile, service: &str) -> Option<String> {
    if ignores_endpoints(environment) {
        return None;
    }
    let own = format!("AWS_ENDPOINT_URL_{}", service.to_uppercase());
    // `object_store` uses the second name.
    let names = [own.as_str(), "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let of_environment = names.iter().find_map(|name| environment.get(*name));
    of_environment.cloned().or_else(|| profile.endpoint(service).map(str::to_owned))
}

fn find_credentials(
    environment: &Environment,
    builder: &AmazonS3Builder,
    profile: &Profile,
) -> Result<CredentialSource, String> {
    let value = |key| builder.get_config_value(&key);
    match (value(Key::AccessKeyId), value(Key::SecretAccessKey)) {
        (Some(_), Some(_)) => return Ok(CredentialSource::Given),
        (Some(_), None) => {
            return Err("AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is not".to_owned());
        }
        (None, Some(_)) => {
            return Err("AWS_SECRET_ACCESS_KEY is set, AWS_ACCESS_KEY_ID is not".to_owned());
        }
        (None, None) if value(Key::SkipSignature).is_some_and(|skips| skips == "true") => {
            return Ok(CredentialSource::Given);
        }
        (None, None) => {}
    }
    if let Some(source) = web_identity_origin(environment, builder, profile) {
        return Ok(CredentialSource::Elsewhere(source));
    }
    let name = &profile.name;
    if profile_keys(profile).is_some() && profile.get("role_arn").is_none() {
        return Ok(CredentialSource::Elsewhere(CredentialOrigin::Profile(environment.clone())));
    }
    let others = ["role_arn", "sso_session", "sso_start_url", "credential_process"];
    if let Some(setting) = others.iter().find(|setting| profile.get(setting).is_some()) {
        return Err(format!(
            "profile '{name}' gets its credentials by {setting}, which draconis does not do; \
             eval \"$(aws configure export-credentials --profile {name} --format env)\" sets them"
        ));
    }
    for (one, other) in [
        ("aws_access_key_id", "aws_secret_access_key"),
        ("aws_secret_access_key", "aws_access_key_id"),
    ] {
        if profile.get(one).is_some() && profile.get(other).is_none() {
            return Err(format!("profile '{name}' has {one}, and no {other}"));
        }
    }
    Ok(container_origin(environment).map_or(CredentialSource::Unknown, CredentialSource::Elsewhere))
}

fn web_identity_origin(
    environment: &Environment,
    builder: &AmazonS3Builder,
    profile: &Profile,
) -> Option<CredentialOrigin> {
    let either = |variable: &str, setting: &str| {
        let value = environment.get(variable).cloned();
        value.or_else(|| profile.get(setting).map(str::to_owned))
    };
    let token_file = either("AWS_WEB_IDENTITY_TOKEN_FILE", "web_identity_token_file")?;
    let role = either("AWS_ROLE_ARN", "role_arn")?;
    let session = either("AWS_ROLE_SESSION_NAME", "role_session_name");
    let region = builder.get_config_value(&Key::Region);
    let region = region.unwrap_or_else(|| "us-east-1".to_owned());
    let of_china = if region.starts_with("cn-") { ".cn" } else { "" };
    let own = || format!("https://sts.{region}.amazonaws.com{of_china}");
    Some(CredentialOrigin::WebIdentity {
        endpoint: endpoint_url(environment, profile, "sts").unwrap_or_else(own),
        role,
        session: session.unwrap_or_else(|| format!("draconis-{}", std::process::id())),
        token_file,
    })
}

fn container_origin(environment: &Environment) -> Option<CredentialOrigin> {
    let value = |name: &str| environment.get(name).cloned();
    let relative = value("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    let relative = relative.map(|path| format!("http://169.254.170.2{path}"));
    Some(CredentialOrigin::Container {
        url: relative.or_else(|| value("AWS_CONTAINER_CREDENTIALS_FULL_URI"))?,
        token_file: value("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
        token: value("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
    })
}

/// Checks that the instance has credentials, if there are no others.
fn check_instance_credentials(
    bucket: &AmazonS3,
    environment: &Environment,
    runtime: &Handle,
) -> Result<(), String> {
    let why = if is_variable_true(environment, "AWS_EC2_METADATA_DISABLED") {
        "AWS_EC2_METADATA_DISABLED is set".to_owned()
    } else {
        let asked = bucket.credentials().get_credential();
        match runtime.block_on(async { tokio::time::timeout(METADATA_TIMEOUT, asked).await }) {
            Ok(Ok(_)) => return Ok(()),
            _ => {
                let own = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT");
                format!("{} has none for this machine", own.map_or(METADATA_URL, String::as_str))
            }
        }
    };
    let [credentials, config] = config_paths(environment).map(|path| display_path(path.as_deref()));
    Err(format!(
        "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or have a profile \
         (AWS_PROFILE) in {credentials} or {config}, as aws configure writes them; {why}"
    ))
}
