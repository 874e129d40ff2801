"""What the ledgers say of experts."""

import dataclasses

from repro.models import ModelConfig, MoEConfig
from repro.train import TrainConfig
from repro.train.ledgers import ledgers

MOE = MoEConfig(experts=8, active=2, ffn=32, latent=16, groups=4, kept_groups=2, balance="sign", router_z_loss=1e-3)


def words(**model) -> dict[str, str]:
    """Role -> text, of all ledgers."""
    found = ledgers(TrainConfig(model=ModelConfig(**model)), {})
    return {f"{key} {role}": text for key, ledger in found.items() for role, text in ledger["rows"].items()}


def test_experts_add_rows_and_a_dense_model_has_none_of_them():
    dense, plain = words(precision="v3"), words(moe=MOE, precision="v3")
    assert not [row for row in dense if "expert" in row or "router" in row]
    added = set(plain) - set(dense)
    assert added == {
        "N1 experts operands", "N2 experts, Fprop", "N2 experts, Dgrad", "N2 experts, Wgrad", "N3 experts", "N3 router",
        "N4 experts", "N5 experts, kept for backward", "N6 selection bias", "N7 experts", "N8 auxiliary losses",
    }  # fmt: skip
    assert plain["N3 router"] == "float32" and "0.001" in plain["N6 selection bias"]
    for part in ("8 of 32", "latent of 16", "2 per token", "2 of 4 groups", "sigmoid"):
        assert part in plain["N7 experts"]


def test_every_setting_of_the_experts_changes_a_word():
    base = words(moe=MOE)
    for change in (
        dict(experts=12), dict(active=1), dict(ffn=16), dict(shared=1), dict(latent=0), dict(latent_norm=False),
        dict(affinity="softmax"), dict(groups=1, kept_groups=1), dict(scale=2.0), dict(normalise=False),
        dict(balance="none"), dict(balance_rate=1e-2), dict(balance_centred=True), dict(router_z_loss=0.0),
        dict(sequence_loss=1e-4),
    ):  # fmt: skip
        assert words(moe=dataclasses.replace(MOE, **change)) != base, change
    assert "emulated" in words(moe=MOE, precision="router=mxfp8")["N3 router"]
