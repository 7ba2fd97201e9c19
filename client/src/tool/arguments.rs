//! The arguments of a call of `bash`, out of the JSON that a model wrote.
//!
//! Keys that are not known are ignored. So nothing that a model writes can reach `stdin`, `env`, `dshEnv` or `stdoutMaxBytes` of the request.
use dsh_policy::SandboxMode;
use serde_json::Value;

use super::error::ToolError;
use super::escalate::Escalation;

/// What a call asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BashArguments {
    /// What `bash -c` gets.
    pub command: String,
    /// For people; changes nothing.
    pub description: String,
    /// Whole milliseconds, at least 1.
    pub timeout_ms: Option<u64>,
    /// Absolute, or relative to the workspace.
    pub workdir: Option<String>,
    /// Do not wait for its end.
    pub background: bool,
    /// A wider mode for this call.
    pub escalation: Option<Escalation>,
}

impl BashArguments {
    /// Reads the arguments. The first fault in the order of the fields is told.
    ///
    /// # Errors
    /// One of the `invalid …` kinds of [`ToolError`].
    pub fn parse(arguments: &Value) -> Result<Self, ToolError> {
        // A key whose value is null is as good as absent: some models write every key.
        let given = |key: &str| arguments.get(key).filter(|value| !value.is_null());
        Ok(Self {
            command: sentence(given("command")).ok_or(ToolError::Command)?,
            description: sentence(given("description")).ok_or(ToolError::Description)?,
            timeout_ms: given("timeoutMs")
                .map(milliseconds)
                .transpose()
                .map_err(|value| ToolError::Timeout(value.to_string()))?,
            workdir: given("workdir")
                .map(|value| sentence(Some(value)).ok_or_else(|| ToolError::Workdir(value.to_string())))
                .transpose()?,
            background: given("run_in_background").map_or(Ok(false), |value| {
                value.as_bool().ok_or_else(|| ToolError::Background(value.to_string()))
            })?,
            escalation: escalation(given("sandbox_permissions"), given("justification"))?,
        })
    }
}

/// A string that is more than blanks, as it is.
pub(super) fn sentence(value: Option<&Value>) -> Option<String> {
    let text = value?.as_str()?;
    (!text.trim().is_empty()).then(|| text.to_owned())
}

/// A limit below a millisecond would be none; beyond what fits, the deployment's cap decides anyway.
pub(super) fn milliseconds(value: &Value) -> Result<u64, &Value> {
    match value.as_f64() {
        Some(number) if number.is_finite() && number > 0.0 => {
            Ok(value.as_u64().unwrap_or_else(|| number.ceil() as u64))
        }
        _ => Err(value),
    }
}

fn escalation(permissions: Option<&Value>, justification: Option<&Value>) -> Result<Option<Escalation>, ToolError> {
    let target = match (permissions, justification) {
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(ToolError::NoPermissions),
        (Some(value), _) => value
            .as_str()
            .and_then(|name| name.parse::<SandboxMode>().ok())
            .filter(|mode| *mode != SandboxMode::ReadOnly)
            .ok_or_else(|| ToolError::Permissions(value.to_string()))?,
    };
    let justification = justification.ok_or(ToolError::NoJustification)?;
    let justification = sentence(Some(justification)).ok_or(ToolError::Justification)?;
    Ok(Some(Escalation { target, justification }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn with(more: Value) -> Value {
        let mut arguments = json!({"command": "ls", "description": "lists"});
        let (Some(all), Value::Object(more)) = (arguments.as_object_mut(), more) else {
            unreachable!()
        };
        all.extend(more);
        arguments
    }

    #[test]
    fn every_fault_has_its_message() {
        let rows = [
            (json!({}), "invalid command: expected a non-empty string"),
            (json!([]), "invalid command: expected a non-empty string"),
            (
                with(json!({"command": ""})),
                "invalid command: expected a non-empty string",
            ),
            (
                with(json!({"command": " \n"})),
                "invalid command: expected a non-empty string",
            ),
            (
                with(json!({"command": ["ls"]})),
                "invalid command: expected a non-empty string",
            ),
            (
                json!({"command": "ls"}),
                "invalid description: expected a non-empty string",
            ),
            (
                with(json!({"description": 1})),
                "invalid description: expected a non-empty string",
            ),
            (
                with(json!({"timeoutMs": 0})),
                "invalid timeoutMs: expected a positive number, got 0",
            ),
            (
                with(json!({"timeoutMs": -1.5})),
                "invalid timeoutMs: expected a positive number, got -1.5",
            ),
            (
                with(json!({"timeoutMs": "5"})),
                "invalid timeoutMs: expected a positive number, got \"5\"",
            ),
            (
                with(json!({"workdir": ""})),
                "invalid workdir: expected a non-empty string, got \"\"",
            ),
            (
                with(json!({"run_in_background": "yes"})),
                "invalid run_in_background: expected a boolean, got \"yes\"",
            ),
            (
                with(json!({"sandbox_permissions": "workspace-write"})),
                "invalid escalation: sandbox_permissions requires a justification",
            ),
            (
                with(json!({"justification": "because"})),
                "invalid escalation: justification is only valid together with sandbox_permissions",
            ),
            (
                with(json!({"sandbox_permissions": "workspace-write", "justification": " "})),
                "invalid justification: expected a non-empty sentence",
            ),
            (
                with(json!({"sandbox_permissions": "read-only", "justification": "because"})),
                "invalid sandbox_permissions: expected \"workspace-write\" or \"danger-full-access\", got \"read-only\"",
            ),
        ];
        for (arguments, message) in rows {
            let error = BashArguments::parse(&arguments).unwrap_err();
            assert_eq!(error.text(), format!("Error: {message}"), "{arguments}");
        }
    }

    #[test]
    fn what_is_asked_for_is_read_and_everything_else_ignored() {
        let arguments = with(json!({
            "timeoutMs": 1500.2, "workdir": "sub", "run_in_background": true, "sandbox_permissions": "danger-full-access",
            "justification": "needs the network", "stdin": "x", "env": {"A": "b"}, "dshEnv": {}, "stdoutMaxBytes": 1
        }));
        let expected = BashArguments {
            command: "ls".into(),
            description: "lists".into(),
            timeout_ms: Some(1501),
            workdir: Some("sub".into()),
            background: true,
            escalation: Some(Escalation {
                target: SandboxMode::DangerFullAccess,
                justification: "needs the network".into(),
            }),
        };
        assert_eq!(BashArguments::parse(&arguments).unwrap(), expected);
        let nulls =
            with(json!({"timeoutMs": null, "workdir": null, "sandbox_permissions": null, "justification": null}));
        assert_eq!(
            BashArguments::parse(&nulls).unwrap(),
            BashArguments::parse(&with(json!({}))).unwrap()
        );
    }
}
