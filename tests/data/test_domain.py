from dataclasses import replace

import pytest
import torch

from ratp.data.domain import LabelledDomain, UnlabelledDomain
from ratp.errors import RatpError


def make_images(count=4, height=5, width=6):
    return torch.arange(count * 3 * height * width).reshape(count, 3, height, width).to(torch.uint8)


def labelled(**changes):
    domain = {"name": "MT", "images": make_images(), "labels": torch.tensor([0, 1, 1, 0]), "classes": ("cat", "dog")}
    return LabelledDomain(**{**domain, **changes})


class TestChecks:
    @pytest.mark.parametrize(
        "bad",
        [
            make_images().float(),
            make_images().long(),
            make_images()[0],
            make_images()[:, :2],
            make_images().movedim(1, 3),
            make_images()[:0],
        ],
        ids=["float", "int64", "one image", "two channels", "channels last", "none"],
    )
    def test_images_must_be_a_non_empty_stack_of_uint8(self, bad):
        for build in (lambda: UnlabelledDomain("MT", bad), lambda: labelled(images=bad)):
            with pytest.raises(RatpError, match="'MT'"):
                build()

    @pytest.mark.parametrize(
        "bad",
        [
            torch.tensor([0, 1]),
            torch.tensor([0.0, 1, 1, 0]),
            torch.tensor([0, 1, 1, 0]).int(),
            torch.zeros(4, 1).long(),
        ],
        ids=["too few", "float", "int32", "a column"],
    )
    def test_labels_must_be_one_integer_per_image(self, bad):
        with pytest.raises(RatpError, match="'MT': labels must be int64 of shape"):
            labelled(labels=bad)

    @pytest.mark.parametrize("bad", [[0, 1, 1, 0], None, torch.tensor([0, 1, 1, 0]).numpy()])
    def test_labels_must_be_a_tensor(self, bad):
        with pytest.raises(RatpError, match="'MT': labels must be a tensor of whole numbers, one per image, got "):
            labelled(labels=bad)

    def test_classes_must_differ(self):
        with pytest.raises(RatpError, match="'MT': class names must be unique, 'cat' is given twice"):
            labelled(classes=("cat", "cat"))

    @pytest.mark.parametrize("wrong", [-1, 2, 100])
    def test_labels_must_name_a_class(self, wrong):
        with pytest.raises(RatpError, match=rf"labels must lie in 0\.\.1.*{wrong}"):
            labelled(labels=torch.tensor([0, 1, wrong, 1]))

    @pytest.mark.parametrize("bad", [torch.ones(4), torch.ones(3, dtype=torch.bool), torch.ones(4, dtype=torch.uint8)])
    def test_the_test_part_must_be_a_mask(self, bad):
        with pytest.raises(RatpError, match="held_out"):
            labelled(held_out=bad)


class TestUnlabelled:
    def test_it_has_the_images_and_no_labels(self):
        domain = labelled(held_out=torch.tensor([True, False, False, True])).unlabelled()
        assert isinstance(domain, UnlabelledDomain)
        assert torch.equal(domain.images, make_images())
        assert set(vars(domain)) == {"name", "images", "manifest"}
        assert not isinstance(domain, LabelledDomain)
        assert len(domain) == 4


class TestSubset:
    @pytest.mark.parametrize("index", [torch.tensor([False, True, False, True]), torch.tensor([1, 3])])
    def test_subset_by_mask_or_positions(self, index):
        part = labelled(held_out=torch.ones(4, dtype=torch.bool)).subset(index)
        assert torch.equal(part.images, make_images()[[1, 3]])
        assert part.labels.tolist() == [1, 0]
        assert (part.name, part.classes, part.held_out) == ("MT", ("cat", "dog"), None)

    def test_empty_subset_is_refused(self):
        with pytest.raises(RatpError, match="empty"):
            labelled().subset(torch.zeros(4, dtype=torch.bool))


class TestFingerprint:
    def test_fingerprint_is_of_the_contents(self):
        copy = labelled(images=make_images().clone(), labels=torch.tensor([0, 1, 1, 0]))
        assert labelled().fingerprint() == copy.fingerprint()
        flipped = make_images().flip(3)
        assert labelled(images=flipped).fingerprint() == labelled(images=flipped.contiguous()).fingerprint()

    def test_fingerprint_covers_every_part(self):
        mask = torch.tensor([True, False, False, False])
        pixel = make_images()
        pixel[3, 2, 4, 5] += 1
        variants = [
            labelled(),
            labelled(name="MM"),
            labelled(classes=("cat", "fox")),
            labelled(classes=("cat", "dog", "fox")),
            labelled(labels=torch.tensor([0, 1, 1, 1])),
            labelled(images=pixel),
            labelled(images=make_images().reshape(4, 3, 6, 5)),
            labelled(held_out=mask),
            labelled(held_out=~mask),
            labelled(images=make_images().flip(0), labels=torch.tensor([0, 1, 1, 0])),
        ]
        assert len({domain.fingerprint() for domain in variants}) == len(variants)

    def test_fingerprint_ignores_device(self):
        domain = labelled(held_out=torch.tensor([True, False, False, False]))
        assert domain.to(torch.device("cpu")).fingerprint() == domain.fingerprint()
        assert torch.equal(domain.to(torch.device("cpu")).held_out, domain.held_out)

    def test_a_replaced_label_is_checked_again(self):
        with pytest.raises(RatpError):
            replace(labelled(), labels=torch.tensor([0, 1, 1, 7]))
