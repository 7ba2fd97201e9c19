//! What a model is told about the `bash` tool: the schema of its arguments and of its value, and the section of the prompt.
use serde_json::{Value, json};

/// Name of the prompt's section.
pub const PROMPT_SECTION: &str = "tool:bash";
/// Where the section stands among the others.
pub const PROMPT_ORDER: u32 = 105;
/// The section.
pub const PROMPT: &str = "Check the [exit code: N] marker on every bash result; investigate failures before moving on.";

/// Which of the optional arguments there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Background tasks (`enableRunInBackground`).
    pub background: bool,
    /// A wider mode: only where something confines.
    pub escalation: bool,
}

/// JSON Schema of the arguments of `bash`.
#[must_use]
pub fn bash_arguments(offer: Offer) -> Value {
    let mut properties = json!({
        "command": {"type": "string", "minLength": 1, "description": "The command, run by `bash -c` in a fresh shell: nothing carries over from one call to the next."},
        "description": {"type": "string", "minLength": 1, "description": "What the command does, in a few words, for the user."},
        "timeoutMs": {"type": "number", "exclusiveMinimum": 0, "description": "Time limit in milliseconds. The default is two minutes."},
        "workdir": {"type": "string", "minLength": 1, "description": "Folder to start in: absolute, or relative to the workspace, which is the default."},
    });
    let mut add = |key: &str, value: Value| properties[key] = value;
    if offer.background {
        add(
            "run_in_background",
            json!({"type": "boolean", "description": "Return at once with a task id instead of waiting for the end."}),
        );
    }
    if offer.escalation {
        add(
            "sandbox_permissions",
            json!({"type": "string", "enum": ["workspace-write", "danger-full-access"],
                "description": "A wider mode for this one call, after a denial. The user is asked. Name the narrowest that suffices."}),
        );
        add(
            "justification",
            json!({"type": "string", "minLength": 1, "description": "Why the wider mode is needed, as one sentence that the user reads. Only together with sandbox_permissions."}),
        );
    }
    json!({"type": "object", "properties": properties, "required": ["command", "description"]})
}

/// JSON Schema of the value of a finished foreground call.
#[must_use]
pub fn bash_value() -> Value {
    let stream = json!({"type": "object", "required": ["text", "truncated", "bytes"], "properties": {
        "text": {"type": "string"}, "truncated": {"type": "boolean"}, "bytes": {"type": "integer", "minimum": 0},
        "spillPath": {"type": "string"}, "raw": {"type": "string"},
    }});
    json!({
        "type": "object",
        "required": ["kind", "exitCode", "signal", "timedOut", "aborted", "timeoutMs", "stdout", "stderr", "sandbox", "environment", "survivors", "usage"],
        "properties": {
            "kind": {"const": "foreground"},
            "exitCode": {"type": ["integer", "null"]},
            "signal": {"type": ["string", "null"]},
            "timedOut": {"type": "boolean"},
            "aborted": {"type": "boolean"},
            "timeoutMs": {"type": "integer", "minimum": 1},
            "stdout": stream, "stderr": stream,
            "sandbox": {"type": "object", "required": ["mode", "denied"], "properties": {
                "mode": {"enum": ["read-only", "workspace-write", "danger-full-access"]},
                "denied": {"type": ["boolean", "null"]},
                "denials": {"type": "array", "items": {"type": "object", "required": ["operation", "errno", "rule"]}},
            }},
            "environment": {"type": "object", "required": ["removed"]},
            "survivors": {"type": "integer", "minimum": 0},
            "usage": {"type": "object"},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_appear_with_what_they_need() {
        let keys = |offer| {
            let schema = bash_arguments(offer);
            let properties = schema["properties"]
                .as_object()
                .map(|all| all.keys().cloned().collect::<Vec<_>>());
            properties.unwrap_or_default()
        };
        let base = ["command", "description", "timeoutMs", "workdir"];
        assert_eq!(keys(Offer::default()), base);
        let all = keys(Offer {
            background: true,
            escalation: true,
        });
        for key in base
            .iter()
            .chain(&["run_in_background", "sandbox_permissions", "justification"])
        {
            assert!(all.contains(&(*key).to_owned()), "{key}");
        }
        assert_eq!(all.len(), 7);
    }
}
