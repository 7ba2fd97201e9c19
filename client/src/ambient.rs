//! What the calling process has: its environment, already scrubbed, and its file mode creation mask.
use dsh_policy::ByteString;
use dsh_policy::environment::{EnvironmentRules, scrub};
use dsh_policy::request::{BashExecRequest, EnvMap};

/// Puts the caller's environment (scrubbed here already, so that secrets never leave the process) and umask into `request`.
/// `rules` are those of the daemon's greeting.
///
/// What the request says already is left alone.
pub fn attach(request: &mut BashExecRequest, rules: &EnvironmentRules) {
    if request.ambient_env.is_none() {
        let all: EnvMap = std::env::vars_os()
            .map(|(name, value)| (ByteString::from(name), ByteString::from(value)))
            .collect();
        let scrubbed = scrub(&all, rules);
        request.ambient_env = Some(scrubbed.variables);
        request.ambient_removed = scrubbed.removed;
    }
    if request.umask.is_none() {
        request.umask = umask();
    }
}

/// The mask of this process, read without changing it (which `umask(2)` cannot).
fn umask() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(line.trim(), 8).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_the_one_in_force() {
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o027));
        let seen = umask();
        rustix::process::umask(before);
        assert_eq!(seen, Some(0o027));
    }

    #[test]
    fn values_that_were_set_on_purpose_stay() {
        let mut request = BashExecRequest {
            ambient_env: Some(EnvMap::new()),
            umask: Some(0o077),
            ..Default::default()
        };
        attach(&mut request, &EnvironmentRules::default());
        assert_eq!((request.ambient_env.unwrap().len(), request.umask), (0, Some(0o077)));
    }
}
