from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOTH: _ClassVar[Phase]
    PREFILL: _ClassVar[Phase]
    DECODE: _ClassVar[Phase]
BOTH: Phase
PREFILL: Phase
DECODE: Phase

class InstanceFrame(_message.Message):
    __slots__ = ("hello", "outputs", "heartbeat", "draining", "blocks", "failed", "adapter_changed", "others", "token", "waited")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    outputs: bytes
    heartbeat: Heartbeat
    draining: Draining
    blocks: Blocks
    failed: Failed
    adapter_changed: AdapterChanged
    others: Load
    token: str
    waited: float
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., outputs: _Optional[bytes] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., adapter_changed: _Optional[_Union[AdapterChanged, _Mapping]] = ..., others: _Optional[_Union[Load, _Mapping]] = ..., token: _Optional[str] = ..., waited: _Optional[float] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("instance_id", "role", "model", "namespace", "epoch", "block_size", "num_blocks", "block_bytes", "max_model_len", "vocab_size", "connector", "device", "dtype", "kernel", "eos_token_ids", "protocol_version", "layout", "convert_kv", "scheduling_policy", "grammars", "allow_inexact", "embedding_size", "classifies", "itl_target", "nonce", "adapters", "loads_adapters", "version", "speculate")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CONVERT_KV_FIELD_NUMBER: _ClassVar[int]
    SCHEDULING_POLICY_FIELD_NUMBER: _ClassVar[int]
    GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_INEXACT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    CLASSIFIES_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LOADS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: str
    model: str
    namespace: bytes
    epoch: int
    block_size: int
    num_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    connector: str
    device: str
    dtype: str
    kernel: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    protocol_version: int
    layout: Layout
    convert_kv: bool
    scheduling_policy: str
    grammars: bool
    allow_inexact: bool
    embedding_size: int
    classifies: bool
    itl_target: float
    nonce: bytes
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    loads_adapters: bool
    version: str
    speculate: str
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., namespace: _Optional[bytes] = ..., epoch: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., connector: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., kernel: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., protocol_version: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., convert_kv: _Optional[bool] = ..., scheduling_policy: _Optional[str] = ..., grammars: _Optional[bool] = ..., allow_inexact: _Optional[bool] = ..., embedding_size: _Optional[int] = ..., classifies: _Optional[bool] = ..., itl_target: _Optional[float] = ..., nonce: _Optional[bytes] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., loads_adapters: _Optional[bool] = ..., version: _Optional[str] = ..., speculate: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path", "loaded_at", "invocation", "lost_name")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOADED_AT_FIELD_NUMBER: _ClassVar[int]
    INVOCATION_FIELD_NUMBER: _ClassVar[int]
    LOST_NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    path: str
    loaded_at: int
    invocation: bytes
    lost_name: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., path: _Optional[str] = ..., loaded_at: _Optional[int] = ..., invocation: _Optional[bytes] = ..., lost_name: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "itemsize", "version", "numerics", "rank", "ranks", "latent", "more", "window")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ITEMSIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LATENT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    itemsize: int
    version: int
    numerics: str
    rank: int
    ranks: int
    latent: bool
    more: _containers.RepeatedCompositeFieldContainer[Section]
    window: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., itemsize: _Optional[int] = ..., version: _Optional[int] = ..., numerics: _Optional[str] = ..., rank: _Optional[int] = ..., ranks: _Optional[int] = ..., latent: _Optional[bool] = ..., more: _Optional[_Iterable[_Union[Section, _Mapping]]] = ..., window: _Optional[int] = ...) -> None: ...

class Section(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "latent", "window")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    LATENT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    latent: bool
    window: int
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., latent: _Optional[bool] = ..., window: _Optional[int] = ...) -> None: ...

class AdapterChanged(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("waiting", "running", "free_blocks", "counters", "costs", "cache_epoch")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    free_blocks: int
    counters: _containers.ScalarMap[str, float]
    costs: Costs
    cache_epoch: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., free_blocks: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., cache_epoch: _Optional[int] = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("prefill", "decode", "transfer")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    prefill: _containers.RepeatedScalarFieldContainer[float]
    decode: _containers.RepeatedScalarFieldContainer[float]
    transfer: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, prefill: _Optional[_Iterable[float]] = ..., decode: _Optional[_Iterable[float]] = ..., transfer: _Optional[_Iterable[float]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("removed", "added", "untold")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    UNTOLD_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    added: bytes
    untold: int
    def __init__(self, removed: _Optional[bytes] = ..., added: _Optional[bytes] = ..., untold: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("requests", "prefill_tokens", "output_tokens", "context_tokens", "prefills", "attended_tokens")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: int
    prefill_tokens: int
    output_tokens: int
    context_tokens: int
    prefills: int
    attended_tokens: int
    def __init__(self, requests: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., prefills: _Optional[int] = ..., attended_tokens: _Optional[int] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("welcome", "submit", "hand_over", "cancel", "drain", "refused", "heard", "reset_cache", "change_adapter")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    RESET_CACHE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    submit: Submit
    hand_over: HandOver
    cancel: Cancel
    drain: Drain
    refused: Refused
    heard: Heard
    reset_cache: ResetCache
    change_adapter: ChangeAdapter
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., heard: _Optional[_Union[Heard, _Mapping]] = ..., reset_cache: _Optional[_Union[ResetCache, _Mapping]] = ..., change_adapter: _Optional[_Union[ChangeAdapter, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router_id", "lease_seconds")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    lease_seconds: float
    def __init__(self, router_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class ResetCache(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ChangeAdapter(_message.Message):
    __slots__ = ("number", "name", "path", "replaces", "digest", "offers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    path: str
    replaces: bool
    digest: bytes
    offers: bool
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ..., path: _Optional[str] = ..., replaces: _Optional[bool] = ..., digest: _Optional[bytes] = ..., offers: _Optional[bool] = ...) -> None: ...

class Heard(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "phase", "request", "output", "members", "writer", "prediction", "leaves_nothing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    LEAVES_NOTHING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    phase: Phase
    request: bytes
    output: _containers.RepeatedScalarFieldContainer[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    writer: Layout
    prediction: bytes
    leaves_nothing: bool
    def __init__(self, request_id: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., request: _Optional[bytes] = ..., output: _Optional[_Iterable[int]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., writer: _Optional[_Union[Layout, _Mapping]] = ..., prediction: _Optional[bytes] = ..., leaves_nothing: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("request_id", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("request_id", "num_blocks", "final", "tickets", "first_token", "coming")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_blocks: int
    final: bool
    tickets: _containers.RepeatedScalarFieldContainer[bytes]
    first_token: int
    coming: int
    def __init__(self, request_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., final: _Optional[bool] = ..., tickets: _Optional[_Iterable[bytes]] = ..., first_token: _Optional[int] = ..., coming: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...
