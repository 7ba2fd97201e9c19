//! The `bash` tool and the tools for its background tasks as an MCP server: whatever speaks the Model Context Protocol runs its commands here.
//!
//! Roots of the client become the workspace, a progress token hears of the output, a cancelled request ends its command, and a wider mode is asked of the user
//! through elicitation. Clients that cannot be asked (or speak a version that forbids it) get the error that says so.
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dsh_policy::SandboxMode;
use rmcp::model::{
    BooleanSchema, CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ElicitRequestParams,
    ElicitationAction, ElicitationSchema, Implementation, ListToolsResult, PaginatedRequestParams,
    ProgressNotificationParam, ProgressToken, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{ElicitationMode, NotificationContext, RequestContext, ServiceError};
use rmcp::{ErrorData, Peer, RoleServer, ServerHandler, ServiceExt as _};
use serde_json::Value;
use tokio::sync::{Mutex, watch};

use crate::address::{self, Endpoint};
use crate::connection::{Connection, Event};
use crate::error::ClientError;
use crate::tool::bash::{Answer, BashTool, Call, Composition};
use crate::tool::environment::{CallContext, EnvironmentRegistry};
use crate::tool::error::ToolError;
use crate::tool::escalate::{Approval, ApprovalRequest, Approver, Audit, AuditFile, PendingApproval};
use crate::tool::prompt;
use crate::tool::schema::{self, Offer};
use crate::tool::task_tools::{self, Caller};

const TOOL: &str = "bash";
const DESCRIPTION: &str = "Runs a shell command with `bash -c`, confined: writes outside of what the mode permits are refused, and each refusal is listed in the result as a fact.";
/// Between two notifications of progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// A person who does not answer a question for so long is not there.
const ANSWER_DEADLINE: Duration = Duration::from_secs(600);

/// How commands are run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Which daemon.
    pub endpoint: Endpoint,
    /// The mode of every call; none is the deployment's default.
    pub mode: Option<SandboxMode>,
    /// The workspace; none is the client's first root, else the current folder.
    pub workspace: Option<PathBuf>,
}

/// Serves the client at the other end of stdin and stdout until it leaves.
///
/// # Errors
/// [`ClientError::Protocol`] when the peer is no MCP client.
pub async fn serve(settings: Settings) -> Result<(), ClientError> {
    let session = format!("mcp-{}-{}", std::process::id(), since_epoch().as_nanos());
    let endpoint = settings.endpoint.clone();
    let server = Server {
        settings,
        session: session.clone(),
        root: Arc::default(),
        environment: EnvironmentRegistry::new(None),
        audit: open_audit()
            .inspect_err(|error| eprintln!("dsh-exec: {error}; no wider mode can be asked for"))
            .ok()
            .map(Arc::new),
    };
    let failed = |error: &dyn std::fmt::Display| ClientError::Local(format!("the MCP client broke off: {error}"));
    let running = server
        .serve(rmcp::transport::io::stdio())
        .await
        .map_err(|error| failed(&error))?;
    running.waiting().await.map_err(|error| failed(&error))?;
    // The client has left, and with it whoever could ask for its tasks.
    Connection::open(endpoint).await?.end_session(&session).await?;
    Ok(())
}

/// The record of escalations, beside the daemon's log.
fn open_audit() -> Result<AuditFile, ClientError> {
    let folder = address::state_folder();
    let failed = |error: &dyn std::fmt::Display| {
        ClientError::Local(format!(
            "cannot keep the record of escalations in {}: {error}",
            folder.display()
        ))
    };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| failed(&error))?;
    AuditFile::open(&folder.join("escalations.jsonl")).map_err(|error| failed(&error))
}

fn since_epoch() -> Duration {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap_or_default()
}

struct Server {
    settings: Settings,
    /// Owns the tasks of this client.
    session: String,
    /// The client's first root, once it was asked for.
    root: Arc<Mutex<Option<PathBuf>>>,
    environment: EnvironmentRegistry,
    /// Keeps every decision about a wider mode; without it nobody is asked.
    audit: Option<Arc<AuditFile>>,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::new(ServerCapabilities::builder().enable_tools().build());
        info.server_info = Implementation::new("dsh-exec", env!("CARGO_PKG_VERSION"));
        info.instructions = Some(format!("{} {}", schema::PROMPT, prompt::TASKS));
        info
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let offer = Offer {
            background: true,
            escalation: self.can_ask(&context.peer),
        };
        let bash = Tool::new(TOOL, DESCRIPTION, object(schema::bash_arguments(offer)));
        Ok(ListToolsResult::with_all_items(vec![
            bash.with_raw_output_schema(Arc::new(object(schema::bash_value()))),
            Tool::new(
                "task_output",
                "Reads what a background task has written since the last read, and how it is.",
                object(schema::task_output()),
            ),
            Tool::new("task_list", "Lists the background tasks.", object(schema::task_list())),
            Tool::new("task_kill", "Ends a background task.", object(schema::task_kill())),
        ]))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.map_or(Value::Null, Value::Object);
        let result = if request.name == TOOL {
            self.run(&arguments, &context).await.map(|answer| {
                let mut result = CallToolResult::success(vec![ContentBlock::text(answer.text)]);
                result.structured_content = serde_json::to_value(&answer.value).ok();
                result
            })
        } else {
            let done = self.about_tasks(&request.name, &arguments, &context).await;
            let done = done
                .ok_or_else(|| ErrorData::invalid_params(format!("there is no tool called {}", request.name), None))?;
            done.map(|text| CallToolResult::success(vec![ContentBlock::text(text)]))
        };
        let result = result.unwrap_or_else(|error| CallToolResult::error(vec![ContentBlock::text(error.text())]));
        Ok(result.into())
    }

    async fn on_roots_list_changed(&self, _: NotificationContext<RoleServer>) {
        *self.root.lock().await = None;
    }
}

impl Server {
    async fn about_tasks(
        &self,
        name: &str,
        arguments: &Value,
        context: &RequestContext<RoleServer>,
    ) -> Option<Result<String, ToolError>> {
        let connection = match Connection::open(self.settings.endpoint.clone()).await {
            Ok(connection) => connection,
            Err(error) => return Some(Err(error.into())),
        };
        let caller = Caller {
            session: Some(&self.session),
            escalation_offered: self.can_ask(&context.peer),
        };
        tokio::select! {
            () = context.ct.cancelled() => Some(Err(ToolError::Aborted)),
            done = task_tools::call(&connection, name, arguments, caller) => done,
        }
    }

    async fn run(&self, arguments: &Value, context: &RequestContext<RoleServer>) -> Result<Answer, ToolError> {
        let call = Call {
            workspace: self.workspace(&context.peer).await?,
            mode: self.settings.mode,
            agent: Some("mcp".to_owned()),
            context: CallContext {
                session: Some(self.session.clone()),
                session_log: None,
            },
        };
        let peer = context.peer.clone();
        let approver = self
            .can_ask(&peer)
            .then(|| Arc::new(Elicitation(peer)) as Arc<dyn Approver>);
        let composition = Composition {
            environment: self.environment.clone(),
            approver: Some(approver.unwrap_or_else(|| Arc::new(NobodyThere))),
            record: Arc::new(|_| {}),
        };
        // A connection of its own for each call: the daemon may have left since the last one.
        let connection = Connection::open(self.settings.endpoint.clone()).await?;
        let tasks = Arc::new(connection.clone());
        let mut tool = BashTool::new(connection, composition).with_tasks(tasks);
        if let Some(audit) = &self.audit {
            tool = tool.with_audit(Arc::clone(audit) as Arc<dyn Audit>);
        }
        let (bytes, seen) = watch::channel(0u64);
        let on_event = |event: &Event| {
            if let Event::Output { data, .. } = event {
                bytes.send_modify(|bytes| *bytes += data.0.len() as u64);
            }
        };
        let progress = async {
            if let Some(token) = context.meta.get_progress_token() {
                tell_progress(&context.peer, token, seen).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answer = tool.call_until(&call, arguments, on_event, context.ct.cancelled()) => answer,
            () = progress => Err(ToolError::Aborted),
        }
    }

    /// Whether the user can be asked, and the answer kept.
    fn can_ask(&self, peer: &Peer<RoleServer>) -> bool {
        self.audit.is_some() && peer.supported_elicitation_modes().contains(&ElicitationMode::Form)
    }

    /// The folder that calls work in.
    async fn workspace(&self, peer: &Peer<RoleServer>) -> Result<PathBuf, ToolError> {
        if let Some(workspace) = &self.settings.workspace {
            return Ok(workspace.clone());
        }
        let mut known = self.root.lock().await;
        if let Some(root) = &*known {
            return Ok(root.clone());
        }
        let root = match first_root(peer).await {
            Some(root) => root,
            None => std::env::current_dir().map_err(|error| {
                ClientError::Local(format!("the current directory is gone ({error}); name a --workspace"))
            })?,
        };
        Ok(known.insert(root).clone())
    }
}

/// The first root that is a folder of this machine. Roots are deprecated by the protocol's latest version, and what the clients of today have.
#[allow(deprecated)]
async fn first_root(peer: &Peer<RoleServer>) -> Option<PathBuf> {
    peer.peer_info()?.capabilities.roots.as_ref()?;
    let roots = peer.list_roots().await.ok()?.roots;
    let mut folders = roots
        .iter()
        .filter_map(|root| url::Url::parse(&root.uri).ok()?.to_file_path().ok());
    folders.next()
}

async fn tell_progress(peer: &Peer<RoleServer>, token: ProgressToken, mut seen: watch::Receiver<u64>) {
    while seen.changed().await.is_ok() {
        let bytes = *seen.borrow_and_update();
        let mut progress = ProgressNotificationParam::new(token.clone(), bytes as f64);
        progress.message = Some(format!("{bytes} bytes of output"));
        if peer.notify_progress(progress).await.is_err() {
            return;
        }
        tokio::time::sleep(PROGRESS_INTERVAL).await;
    }
}

/// Asks the user through the client.
struct Elicitation(Peer<RoleServer>);

impl Approver for Elicitation {
    fn ask<'a>(&'a self, request: &'a ApprovalRequest) -> PendingApproval<'a> {
        Box::pin(async move {
            let question = format!("{}\n\n{}", request.reason, request.command);
            let allow =
                |schema: BooleanSchema| schema.description(format!("Run this one command in {} mode", request.target));
            let Ok(requested_schema) = ElicitationSchema::builder()
                .required_bool_property("allow", allow)
                .build()
            else {
                return Approval::Unavailable;
            };
            let params = ElicitRequestParams::FormElicitationParams {
                meta: None,
                message: question,
                requested_schema,
            };
            match self
                .0
                .create_elicitation_with_timeout(params, Some(ANSWER_DEADLINE))
                .await
            {
                Ok(answer) => match answer.action {
                    ElicitationAction::Accept => {
                        let allowed = answer
                            .content
                            .is_some_and(|content| content["allow"] == Value::Bool(true));
                        if allowed {
                            Approval::AllowedOnce
                        } else {
                            Approval::Rejected
                        }
                    }
                    ElicitationAction::Decline => Approval::Rejected,
                    ElicitationAction::Cancel => Approval::Cancelled,
                    // Of a version of the protocol that is not known here; never a yes.
                    _ => Approval::Unavailable,
                },
                Err(ServiceError::Cancelled { .. }) => Approval::Cancelled,
                Err(_) => Approval::Unavailable,
            }
        })
    }
}

/// For clients without elicitation: whoever asks hears that there is no channel.
struct NobodyThere;

impl Approver for NobodyThere {
    fn is_reachable(&self) -> bool {
        false
    }

    fn ask<'a>(&'a self, _: &'a ApprovalRequest) -> PendingApproval<'a> {
        Box::pin(std::future::ready(Approval::Unavailable))
    }
}

/// The schemas of this crate are objects.
fn object(schema: Value) -> rmcp::model::JsonObject {
    match schema {
        Value::Object(object) => object,
        _ => rmcp::model::JsonObject::new(),
    }
}
